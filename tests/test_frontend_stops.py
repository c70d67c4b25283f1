"""Stop strings over streamed text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.frontend.stops import StopMatcher


def run(stops, pieces):
    """Shown text, piece by piece, and the piece that stopped (None: flushed)."""
    matcher = StopMatcher(stops)
    shown = []
    for number, piece in enumerate(pieces):
        text, is_stop = matcher.push(piece)
        shown.append(text)
        if is_stop:
            return shown, number
    return [*shown, matcher.flush()], None


def test_without_stop_strings_text_passes_at_once():
    assert run([], ["ab", "c"]) == (["ab", "c", ""], None)


def test_a_stop_string_over_several_pieces_is_never_shown():
    assert run(["DEFGHIJ"], ["...ABC", "DEF", "GH", "IJ", "K"]) == (["...ABC", "", "", ""], 3)


def test_a_beginning_that_comes_to_nothing_is_released():
    assert run(["DEFGHIJ"], ["ABC", "DEF", "X"]) == (["ABC", "", "DEFX", ""], None)


def test_a_stop_string_inside_a_piece_cuts_before_it():
    assert run(["gamma"], ["alpha, ", "xgamma,"]) == (["alpha, ", "x"], 1)


def test_text_held_back_is_shown_when_nothing_more_comes():
    assert run(["DEFGHIJ"], ["ABCDEF"]) == (["ABC", "DEF"], None)


def test_only_the_suffix_that_can_still_match_is_held_back():
    matcher = StopMatcher(["abcd"])
    assert matcher.push("xxabxabc") == ("xxabx", False)


def test_of_a_stop_string_and_its_prefix_the_prefix_wins():
    assert run(["ab", "abc"], ["xabc"]) == (["x"], 0)


def test_of_two_complete_at_once_the_longer_wins():
    assert run(["c", "abc"], ["xabc"]) == (["x"], 0)


def test_the_stop_string_complete_first_wins_over_one_that_began_earlier():
    assert run(["XYZW", "YZ"], ["aXYZW"]) == (["aX"], 0)


def test_a_stop_string_at_the_very_start_shows_nothing():
    assert run(["hi"], ["hi there"]) == ([""], 0)


def test_an_emoji_can_be_a_stop_string():
    assert run(["🦊"], ["a", "🧑‍🚀🦊b"]) == (["a", "🧑‍🚀"], 1)


def test_a_repeating_stop_string_is_found_after_a_false_start():
    assert run(["aab"], ["aa", "ab"]) == (["", "a"], 1)


def test_a_stop_string_that_may_not_stop_yet_is_shown():
    matcher = StopMatcher(["ab"])
    assert matcher.push("xab", may_stop=False) == ("xab", False)
    assert matcher.push("ab") == ("", True)


def test_an_ignored_stop_string_may_begin_the_next_one():
    matcher = StopMatcher(["aba"])
    assert matcher.push("aba", may_stop=False) == ("ab", False)
    assert matcher.push("ba") == ("", True)


@given(
    st.text(alphabet="ab", max_size=40),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(0, 40), max_size=8),
)
def test_the_cut_does_not_depend_on_how_the_text_was_divided(text, stops, places):
    cuts = sorted({min(place, len(text)) for place in places} | {0, len(text)})
    pieces = [text[begin:end] for begin, end in zip(cuts, cuts[1:], strict=False)]
    divided, stopped = run(stops, pieces)
    whole, whole_stopped = run(stops, [text])
    assert ("".join(divided), stopped is None) == ("".join(whole), whole_stopped is None)


@given(st.text(alphabet="abc", max_size=30), st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4))
def test_shown_text_holds_no_stop_string_and_ends_before_the_first_to_be_complete(text, stops):
    shown, _ = run(stops, list(text))
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    expected = text if not ends else text[: min(ends)[0] + min(ends)[1]]
    assert "".join(shown) == expected
    assert not any(stop in expected for stop in stops)


@pytest.mark.parametrize("length", [1, 2, 1000])
def test_what_is_held_back_is_always_shorter_than_the_stop_string(length):
    matcher = StopMatcher(["a" * length])
    shown = "".join(matcher.push("a", may_stop=False)[0] for _ in range(2500))
    assert len(shown) == 2500 - (length - 1)
