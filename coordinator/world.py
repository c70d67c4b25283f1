"""Everything the core's state machine knows, in one place that its parts share.

Owns the collections and the list of actions of the present step; decides nothing. Invariant: time is what the step was
told, and `out` holds only this step's actions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from math import ceil
from typing import Any

from coordinator.events import Action, Ignored, Send
from coordinator.ledger import Ledger
from coordinator.live import Live, Lives
from coordinator.prefix_index import PrefixIndex
from coordinator.router import policy
from coordinator.tally import Tally
from coordinator.waiting import Waiting
from coordinator.workers import Registry
from pdserve.config import CoreConfig
from pdserve.forecast import Forecast
from pdserve.layout import KVLayout

StopsAtFirst = Callable[[int, Sequence[str]], bool]
Digests = Callable[[Sequence[int], KVLayout, str], list[bytes]]


class World:
    def __init__(self, *, config: CoreConfig, core: str) -> None:
        self.config = config
        self.core = core
        self.workers = Registry()
        self.ledger = Ledger()
        self.index = PrefixIndex()
        self.forecast = Forecast()
        self.policy = policy(config.core.router, config.core.seed or 0)
        self.lives = Lives()
        self.waiting = Waiting(max_bypasses=config.max_bypasses)
        self.timers = Timers()
        self.tally = Tally()
        self.out: list[Action] = []
        self.now_s = 0.0
        self.now_ns = 0
        self.growth: dict[str, float] = {}  # expected blocks per decode worker, as of this step's last placement
        self.num_changes = 0  # that may let a waiting request be placed; none since it was tried: it still does not fit
        self.must_pump = False

    def begin(self, now_s: float) -> None:
        self.now_s, self.now_ns = now_s, round(now_s * 1e9)
        self.out = []
        self.growth.clear()

    def send(self, to: str, message: Any) -> None:
        self.out.append(Send(to, message))

    def ignore(self, reason: str) -> None:
        self.tally.count("pdserve_messages_ignored_total", reason=reason)
        self.out.append(Ignored(reason))

    def wait(self, live: Live) -> None:
        """Into the queue, at its old place if it was there before."""
        live.queue_due_s = self.now_s + self.config.timeouts.queue_timeout_s
        self.waiting.add(live)
        self.timers.push(live)
        live.tried_at = -1
        self.must_pump = True

    def make_room(self) -> None:
        """Something came free, or a worker came or went."""
        self.num_changes += 1
        self.must_pump = True

    def predicted_wait_s(self) -> float:
        """Until what waits now is prefilled."""
        role = "decode" if self.config.is_colocated or self.config.core.disaggregate == "never" else "prefill"
        workers = self.workers.routable(role)
        rate = sum(worker.prefill_rate for worker in workers)
        queued = self.waiting.num_tokens + sum(self.ledger.book(worker.epoch).queued_tokens for worker in workers)
        return queued / rate if rate else 0.0

    def retry_after_s(self) -> float:
        return float(min(60, max(1, ceil(self.predicted_wait_s()))))


class Timers:
    """When each live request must be looked at next. Entries that no longer hold are dropped when met."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Live]] = []
        self._live: dict[int, float] = {}  # arrival -> the entry that holds

    def push(self, live: Live) -> None:
        due_s = live.next_due_s()
        if self._live.get(live.arrival) != due_s:
            self._live[live.arrival] = due_s
            heappush(self._heap, (due_s, live.arrival, live))
        if len(self._heap) > 4 * len(self._live) + 64:
            self._heap = [entry for entry in self._heap if self._holds(entry)]
            heapify(self._heap)

    def remove(self, live: Live) -> None:
        self._live.pop(live.arrival, None)

    def pop_due(self, now_s: float) -> list[Live]:
        due = []
        while self._heap and (self._heap[0][0] <= now_s or not self._holds(self._heap[0])):
            entry = heappop(self._heap)
            if self._holds(entry):
                del self._live[entry[1]]
                due.append(entry[2])
        return due

    def next_s(self) -> float | None:
        while self._heap and not self._holds(self._heap[0]):
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def _holds(self, entry: tuple[float, int, Live]) -> bool:
        return self._live.get(entry[1]) == entry[0]
