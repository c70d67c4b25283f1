"""How long outputs will get, and the memory that takes."""

from hypothesis import given
from hypothesis import strategies as st

from decode_node.room import future_peak
from pdserve.forecast import Forecast


def forecast_after(lengths):
    forecast = Forecast()
    for length in lengths:
        forecast.observe(length)
    return forecast


def test_until_enough_outputs_were_seen_everything_that_may_come_is_expected():
    assert forecast_after([1] * 99).most_to_come(10, 200) == 190


def test_the_forecast_is_a_high_quantile_of_recent_lengths():
    assert forecast_after(range(1, 101)).most_to_come(0, 200) == 91


def test_what_was_generated_already_conditions_the_forecast():
    assert forecast_after(range(1, 101)).most_to_come(90, 200) == 10


def test_an_output_longer_than_all_before_may_get_as_long_as_it_is_allowed_to():
    assert forecast_after(range(1, 101)).most_to_come(100, 200) == 100


def test_a_forecast_never_exceeds_what_the_request_may_generate():
    assert forecast_after([1000] * 100).most_to_come(5, 20) == 15


def test_old_outputs_are_forgotten():
    assert forecast_after([1000] * 1000 + [10] * 1000).most_to_come(0, 2000) == 10


def test_the_peak_of_one_is_its_end():
    assert future_peak([(3, 32)], 16) == 5


def test_one_that_ends_soon_leaves_before_the_others_are_long():
    # after 16 tokens both have grown by one block (4 + 2 = 6); then one is left and ends with 2 + 10 blocks
    assert future_peak([(2, 160), (2, 16)], 16) == 12
    assert future_peak([(2, 160), (20, 16)], 16) == 24


def test_the_peak_of_nothing_is_nothing():
    assert future_peak([], 16) == 0


def seen(*lengths: int, window: int = 1000) -> Forecast:
    forecast = Forecast(window=window, min_samples=1)
    for length in lengths:
        forecast.observe(length)
    return forecast


def test_the_mean_is_max_tokens_until_a_hundred_outputs_were_seen():
    forecast = Forecast()
    for _ in range(99):
        forecast.observe(5)
    assert forecast.mean_to_come(2, 50) == 48
    forecast.observe(5)
    assert forecast.mean_to_come(2, 50) == 3


def test_the_mean_looks_only_at_outputs_that_became_longer():
    assert seen(2, 10, 20).mean_to_come(5, 100) == 10


def test_the_mean_is_never_more_than_max_tokens_leaves():
    assert seen(10, 100).mean_to_come(5, 20) == (10 + 20) / 2 - 5


def test_by_the_mean_an_output_longer_than_all_before_may_go_to_its_end():
    assert seen(2, 3).mean_to_come(7, 20) == 13


def test_the_mean_forgets_old_outputs():
    assert seen(100, 4, 4, window=2).mean_to_come(0, 500) == 4


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(0, 60), st.integers(1, 60), st.integers(1, 40)
)
def test_the_mean_equals_its_definition(lengths, generated, max_tokens, window):
    forecast = seen(*lengths, window=window)
    longer = [min(length, max_tokens) for length in lengths[-window:] if length > generated]
    left = max(0, max_tokens - generated)
    expected = left if not longer else min(left, max(0.0, sum(longer) / len(longer) - generated))
    assert abs(forecast.mean_to_come(generated, max_tokens) - expected) < 1e-9
