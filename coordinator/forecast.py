"""How many tokens a sample will still generate, from how long recent ones became.

Owns the lengths of the last outputs; knows no request. Invariant: a forecast is between 0 and what `max_tokens` leaves,
and it is exactly that until `min_samples` outputs have been seen.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from itertools import accumulate


class Forecast:
    """E[min(length, max_tokens) | length > generated so far], less what is generated."""

    def __init__(self, *, window: int = 1000, min_samples: int = 100) -> None:
        assert 0 < min_samples <= window, (min_samples, window)
        self._recent: deque[int] = deque()
        self._window = window
        self._min_samples = min_samples
        self._sorted: list[int] = []
        self._sums: list[int] | None = None  # sums of the i smallest

    @property
    def num_samples(self) -> int:
        return len(self._recent)

    def observe(self, length: int) -> None:
        """A sample ended with so many tokens."""
        if len(self._recent) == self._window:
            oldest = self._recent.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._recent.append(length)
        insort(self._sorted, length)
        self._sums = None

    def remaining(self, *, generated: int, max_tokens: int) -> float:
        left = max(0, max_tokens - generated)
        if len(self._recent) < self._min_samples:
            return left
        first = bisect_right(self._sorted, generated)
        num_longer = len(self._sorted) - first
        if num_longer == 0:
            return left
        if self._sums is None:
            self._sums = list(accumulate(self._sorted, initial=0))
        capped = max(first, bisect_right(self._sorted, max_tokens))
        total = self._sums[capped] - self._sums[first] + max_tokens * (len(self._sorted) - capped)
        return min(left, max(0.0, total / num_longer - generated))
