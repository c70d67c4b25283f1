"""How many tokens a sample will still generate, from how long recent ones became.

Owns the lengths of the last outputs; knows no request and reserves nothing. Invariant: a forecast is between 0 and what
`max_tokens` leaves, and it is exactly that until `min_samples` outputs have been seen.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from itertools import accumulate

QUANTILE = 0.9


class Forecast:
    """What may be expected of a length, given that it is more than what is generated already."""

    def __init__(self, *, window: int = 1000, min_samples: int = 100) -> None:
        assert 0 < min_samples <= window, (min_samples, window)
        self._recent: deque[int] = deque()
        self._window = window
        self._min_samples = min_samples
        self._sorted: list[int] = []
        self._sums: list[int] | None = None  # sums of the i smallest

    def observe(self, length: int) -> None:
        """A sample ended with so many tokens."""
        if len(self._recent) == self._window:
            oldest = self._recent.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._recent.append(length)
        insort(self._sorted, length)
        self._sums = None

    def mean_to_come(self, num_generated: int, max_tokens: int) -> float:
        """E[min(length, max_tokens) | length > num_generated], less what is generated: for many samples together."""
        left = max(0, max_tokens - num_generated)
        first = self._first_longer(num_generated)
        if first is None:
            return left
        if self._sums is None:
            self._sums = list(accumulate(self._sorted, initial=0))
        capped = max(first, bisect_right(self._sorted, max_tokens))
        total = self._sums[capped] - self._sums[first] + max_tokens * (len(self._sorted) - capped)
        return min(left, max(0.0, total / (len(self._sorted) - first) - num_generated))

    def most_to_come(self, num_generated: int, max_tokens: int) -> int:
        """A high quantile of the same lengths: for one sample that must not run out of memory."""
        first = self._first_longer(num_generated)
        if first is None:
            return max_tokens - num_generated
        at = first + int(QUANTILE * (len(self._sorted) - first))
        return min(self._sorted[min(at, len(self._sorted) - 1)], max_tokens) - num_generated

    def _first_longer(self, num_generated: int) -> int | None:
        """Where the longer lengths begin; None: too few were seen, or none is longer."""
        first = bisect_right(self._sorted, num_generated)
        return None if len(self._sorted) < self._min_samples or first == len(self._sorted) else first
