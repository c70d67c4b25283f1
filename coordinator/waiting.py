"""The core's one queue of requests without a worker.

Owns the order (priority, then arrival) and how often a request was by-passed; does not know what fits where.
Invariant: a request that did not fit is overtaken at most `max_bypasses` times, then nobody behind it is offered.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from coordinator.live import Live

LOOKAHEAD = 32  # requests behind the first that are offered a place, so that a full server costs little


class Waiting:
    def __init__(self, *, max_bypasses: int) -> None:
        self._max_bypasses = max_bypasses
        self._order: list[tuple[int, int]] = []
        self._lives: dict[tuple[int, int], Live] = {}
        self.num_tokens = 0  # of prompts
        self.num_samples = 0

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Live]:
        return (self._lives[key] for key in self._order)

    def __contains__(self, live: Live) -> bool:
        return self._lives.get(live.order) is live

    def add(self, live: Live) -> None:
        assert live.order not in self._lives, live.request
        insort(self._order, live.order)
        self._lives[live.order] = live
        self.num_tokens += len(live.submit.prompt)
        self.num_samples += live.submit.sampling.n

    def remove(self, live: Live) -> None:
        if live in self:
            del self._lives[live.order]
            del self._order[bisect_left(self._order, live.order)]
            self.num_tokens -= len(live.submit.prompt)
            self.num_samples -= live.submit.sampling.n

    def offer(self, try_place: Callable[[Live], bool | None]) -> None:
        """Go through the queue in order. `try_place` says True: placed; False: does not fit; None: no matter.

        None is for one that is over, or whose pool is empty: being overtaken costs it nothing.
        """
        overtaken: list[Live] = []
        for order in self._order[:LOOKAHEAD]:
            live = self._lives.get(order)
            if live is None:
                continue
            verdict = try_place(live)
            if verdict is False:
                overtaken.append(live)
                if live.num_bypassed >= self._max_bypasses:
                    return
            elif verdict:
                self.remove(live)
                for other in overtaken:
                    other.num_bypassed += 1
                if any(other.num_bypassed >= self._max_bypasses for other in overtaken):
                    return

    def check(self) -> None:
        assert self._order == sorted(self._order) and set(self._order) == set(self._lives), self._order
        assert self.num_tokens == sum(len(live.submit.prompt) for live in self._lives.values()), self.num_tokens
        assert self.num_samples == sum(live.submit.sampling.n for live in self._lives.values()), self.num_samples
