"""How long outputs will get, and the memory that takes."""

from decode_node.forecast import MAX_OBSERVED, MIN_OBSERVED, Forecast, future_peak


def forecast_after(lengths):
    forecast = Forecast()
    for length in lengths:
        forecast.observe(length)
    return forecast


def test_until_enough_outputs_were_seen_everything_that_may_come_is_expected():
    assert forecast_after([1] * (MIN_OBSERVED - 1)).to_come(10, 200) == 190


def test_the_forecast_is_a_high_quantile_of_recent_lengths():
    assert forecast_after(range(1, 101)).to_come(0, 200) == 91


def test_what_was_generated_already_conditions_the_forecast():
    assert forecast_after(range(1, 101)).to_come(90, 200) == 10


def test_an_output_longer_than_all_before_may_get_as_long_as_it_is_allowed_to():
    assert forecast_after(range(1, 101)).to_come(100, 200) == 100


def test_a_forecast_never_exceeds_what_the_request_may_generate():
    assert forecast_after([1000] * 100).to_come(5, 20) == 15


def test_old_outputs_are_forgotten():
    assert forecast_after([1000] * MAX_OBSERVED + [10] * MAX_OBSERVED).to_come(0, 2000) == 10


def test_the_peak_of_one_is_its_end():
    assert future_peak([(3, 32)], 16) == 5


def test_one_that_ends_soon_leaves_before_the_others_are_long():
    # after 16 tokens both have grown by one block (4 + 2 = 6); then one is left and ends with 2 + 10 blocks
    assert future_peak([(2, 160), (2, 16)], 16) == 12
    assert future_peak([(2, 160), (20, 16)], 16) == 24


def test_the_peak_of_nothing_is_nothing():
    assert future_peak([], 16) == 0
