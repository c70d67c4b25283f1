"""One answer growing token by token."""

import pytest
from front_kit import EOS, byte_level, token
from hypothesis import given
from hypothesis import strategies as st

from coordinator.frontend.choice import Choice
from coordinator.frontend.envelope import ServiceError
from coordinator.frontend.tokenizer import TextTokenizer
from pdserve.messages import Output, SampleEnded
from pdserve.request import Sampling

TOKENIZER = TextTokenizer(byte_level())


def choice(*stops, **sampling):
    fields = {"max_tokens": 100, "eos_token_ids": (EOS,), **sampling}
    return Choice(0, table=TOKENIZER.table, sampling=Sampling(**fields), stop=stops)


def push(target, *ids, first=None):
    first = target.num_generated if first is None else first
    target.push(Output(ticket=1, sample=0, first=first, tokens=tuple(map(token, ids))))


def end(target, reason="length", num_generated=None):
    count = target.num_generated if num_generated is None else num_generated
    target.end(SampleEnded(ticket=1, sample=0, reason=reason, num_generated=count))


def chars(text):
    """One id per byte."""
    return [TOKENIZER.encode(char)[0] for char in text]


def test_text_comes_as_it_is_pushed():
    answer = choice()
    push(answer, *TOKENIZER.encode("hello"))
    assert answer.take().text == "hello"
    push(answer, *TOKENIZER.encode(" world"))
    assert answer.take().text == " world"
    assert answer.take().text == ""


def test_an_answer_ends_as_the_core_says():
    answer = choice()
    push(answer, *TOKENIZER.encode("hello"))
    end(answer, "length")
    assert (answer.finish_reason, answer.is_over) == ("length", True)


def test_the_end_token_has_no_text_but_counts():
    answer = choice()
    push(answer, *TOKENIZER.encode("hello"), EOS)
    end(answer, "stop")
    assert (answer.take().text, answer.num_generated, answer.finish_reason) == ("hello", 2, "stop")


def test_a_stop_token_with_text_has_none_here():
    answer = choice(stop_token_ids=tuple(TOKENIZER.encode(" world")))
    push(answer, *TOKENIZER.encode("hello world"))
    end(answer, "stop")
    assert answer.take().text == "hello"


def test_an_end_token_that_is_to_be_ignored_has_no_text_and_ends_nothing():
    answer = choice(ignore_eos=True)
    push(answer, *TOKENIZER.encode("hello"), EOS, *TOKENIZER.encode(" world"))
    assert answer.take().text == "hello world"
    assert not answer.is_over


def test_an_end_token_first_gives_an_empty_answer():
    answer = choice()
    push(answer, EOS)
    end(answer, "stop")
    assert (answer.take().text, answer.num_generated) == ("", 1)


def test_a_stop_string_ends_the_answer_at_the_token_that_completed_it():
    answer = choice("cd")
    push(answer, *chars("abcdef"))
    assert (answer.take().text, answer.stop_found_at, answer.num_generated) == ("ab", 4, 4)
    assert answer.finish_reason == "stop"


def test_tokens_after_a_stop_string_are_not_counted():
    answer = choice("cd")
    push(answer, *chars("abcd"))
    push(answer, *chars("ef"), first=4)
    assert (answer.num_generated, [info.token for info in answer.take().tokens]) == (4, chars("abcd"))


def test_a_stop_string_with_the_last_token_wins_over_the_length():
    answer = choice("cd", max_tokens=4)
    push(answer, *chars("abcd"))
    end(answer, "length")
    assert (answer.finish_reason, answer.take().text) == ("stop", "ab")


def test_what_was_held_back_is_shown_at_the_end():
    answer = choice("cdX")
    push(answer, *chars("abcd"))
    assert answer.take().text == "ab"
    end(answer)
    assert answer.take().text == "cd"


def test_what_was_held_back_is_shown_before_an_end_token():
    answer = choice("cdX")
    push(answer, *chars("abcd"), EOS)
    end(answer, "stop")
    assert answer.take().text == "abcd"


def test_a_stop_string_before_min_tokens_is_text():
    answer = choice("b", min_tokens=3)
    push(answer, *chars("abcb"))
    assert (answer.take().text, answer.stop_found_at) == ("abc", 4)


def test_a_stop_string_at_min_tokens_stops():
    answer = choice("c", min_tokens=3)
    push(answer, *chars("abc"))
    assert answer.stop_found_at == 3


def test_a_stop_string_in_the_first_token_shows_nothing():
    answer = choice("hell")
    push(answer, *TOKENIZER.encode("hello"))
    assert (answer.take().text, answer.stop_found_at) == ("", 1)


def test_a_character_in_parts_is_shown_whole():
    answer = choice()
    raw = [i for byte in "é".encode() for i in range(3, 400) if TOKENIZER.table.bytes_of(i) == bytes([byte])]
    push(answer, raw[0])
    assert answer.take().text == ""
    push(answer, raw[1])
    assert answer.take().text == "é"


def test_half_a_character_at_the_end_is_shown_as_such():
    answer = choice()
    push(answer, next(i for i in range(3, 400) if TOKENIZER.table.bytes_of(i) == b"\xc3"))
    end(answer)
    assert answer.take().text == "\ufffd"


def test_offsets_count_characters_before_each_token():
    answer = choice()
    push(answer, *TOKENIZER.encode("hello world"), *chars("!x"))
    assert [info.offset for info in answer.take().tokens] == [0, 5, 11, 12]


def test_repeated_tokens_are_skipped():
    answer = choice()
    push(answer, *chars("abc"))
    push(answer, *chars("bcd"), first=1)
    assert (answer.take().text, answer.num_generated) == ("abcd", 4)


def test_a_gap_is_a_broken_promise():
    answer = choice()
    with pytest.raises(ServiceError):
        push(answer, *chars("a"), first=1)


def test_an_end_that_counts_differently_is_a_broken_promise():
    answer = choice()
    push(answer, *chars("abc"))
    with pytest.raises(ServiceError):
        end(answer, "length", num_generated=4)


@given(
    st.text(alphabet="abcd é🦊", max_size=25),
    st.integers(1, 7),
    st.lists(st.text("abc", min_size=1, max_size=3), max_size=3),
)
def test_grouping_changes_nothing(text, size, stops):
    ids = TOKENIZER.encode(text)
    alone, grouped = choice(*stops), choice(*stops)
    for item in ids:
        push(alone, item)
    for begin in range(0, len(ids), size):
        if not grouped.is_over:
            push(grouped, *ids[begin : begin + size], first=begin)
    for answer in (alone, grouped):
        end(answer, num_generated=len(ids))
    assert alone.take() == grouped.take()
    assert (alone.num_generated, alone.finish_reason) == (grouped.num_generated, grouped.finish_reason)
