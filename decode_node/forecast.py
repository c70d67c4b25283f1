"""How long outputs will get, and what that means for memory.

Owns the recent output lengths; reserves nothing. Invariant: a forecast never exceeds what the request may generate.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable

MIN_OBSERVED = 100
MAX_OBSERVED = 1000
QUANTILE = 0.9


class Forecast:
    """The conditional quantile of recent output lengths: P(length <= l | length > generated so far)."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def observe(self, num_generated: int) -> None:
        """A sample ended by itself after this many tokens."""
        if len(self._recent) == MAX_OBSERVED:
            oldest = self._recent.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._recent.append(num_generated)
        insort(self._sorted, num_generated)

    def to_come(self, num_generated: int, max_tokens: int) -> int:
        """Tokens still to be generated: all that may come, until enough outputs have been seen."""
        longer = bisect_right(self._sorted, num_generated)
        if len(self._sorted) < MIN_OBSERVED or longer == len(self._sorted):
            return max_tokens - num_generated
        at = longer + int(QUANTILE * (len(self._sorted) - longer))
        return min(self._sorted[min(at, len(self._sorted) - 1)], max_tokens) - num_generated


def future_peak(loads: Iterable[tuple[int, int]], block_size: int) -> int:
    """The most blocks ever held if each of `loads`, (blocks now, tokens to come), grows to its end and leaves.

    When the n-th longest ends, the n longest are there and each has grown as much as it (after Gong et al., 2025).
    """
    held = peak = 0
    for num, (blocks, to_come) in enumerate(sorted(loads, key=lambda load: -load[1]), start=1):
        held += blocks
        peak = max(peak, held - (-num * to_come // block_size))
    return peak
