"""How long outputs will become."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.forecast import Forecast


def seen(*lengths: int, window: int = 1000) -> Forecast:
    forecast = Forecast(window=window, min_samples=1)
    for length in lengths:
        forecast.observe(length)
    return forecast


def test_it_is_max_tokens_until_a_hundred_outputs_were_seen():
    forecast = Forecast()
    for _ in range(99):
        forecast.observe(5)
    assert forecast.remaining(generated=2, max_tokens=50) == 48
    forecast.observe(5)
    assert forecast.remaining(generated=2, max_tokens=50) == 3


def test_it_looks_only_at_outputs_that_became_longer():
    assert seen(2, 10, 20).remaining(generated=5, max_tokens=100) == 10


def test_it_is_never_more_than_max_tokens_leaves():
    assert seen(10, 100).remaining(generated=5, max_tokens=20) == (10 + 20) / 2 - 5


def test_an_output_longer_than_all_before_may_go_to_its_end():
    assert seen(2, 3).remaining(generated=7, max_tokens=20) == 13


def test_old_outputs_are_forgotten():
    assert seen(100, 4, 4, window=2).remaining(generated=0, max_tokens=500) == 4


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(0, 60), st.integers(1, 60), st.integers(1, 40)
)
def test_it_equals_the_definition(lengths, generated, max_tokens, window):
    forecast = seen(*lengths, window=window)
    longer = [min(length, max_tokens) for length in lengths[-window:] if length > generated]
    left = max(0, max_tokens - generated)
    expected = left if not longer else min(left, max(0.0, sum(longer) / len(longer) - generated))
    assert abs(forecast.remaining(generated=generated, max_tokens=max_tokens) - expected) < 1e-9
