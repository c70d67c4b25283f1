"""What a worker says it holds, against what the core thinks it holds (law 11).

Owns the comparison, heartbeat by heartbeat; acting on it is the machine's. Heartbeats are older than they look and
overtake the session's messages, so a difference counts only when it lasts, and a key is missed only by a loop that
turns. Invariant: comparing changes nothing but the memory of former heartbeats.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.ledger import Book
from coordinator.workers import Worker
from pdserve.messages import Heartbeat, Key

NUM_MISSES = 2  # heartbeats in a row, the worker's loop having turned between them


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    strangers: tuple[Key, ...]  # held there without business: drop again
    missing: tuple[Key, ...]  # promised there, and not there


def compare(worker: Worker, heartbeat: Heartbeat, book: Book, wanted: frozenset[Key], now_s: float) -> Differences:
    """`wanted` are the keys in `book` that belong to a present placement; the others wait to be released."""
    return _Comparison(worker, heartbeat, now_s).differences(book, wanted)


class _Comparison:
    def __init__(self, worker: Worker, heartbeat: Heartbeat, now_s: float) -> None:
        self._worker = worker
        self._has_turned = worker.heartbeat is not None and heartbeat.step > worker.heartbeat.step
        self._held = frozenset(heartbeat.held) | frozenset(heartbeat.leases)
        self._now_s = now_s
        worker.heartbeat = heartbeat

    def differences(self, book: Book, wanted: frozenset[Key]) -> Differences:
        return Differences(strangers=self._strangers(wanted), missing=self._missing(book))

    def _strangers(self, wanted: frozenset[Key]) -> tuple[Key, ...]:
        since = {key: self._worker.strangers.get(key, self._now_s) for key in self._held - wanted}
        lasting = [key for key, at_s in since.items() if self._now_s - at_s >= self._worker.grace_s]
        self._worker.strangers = {key: at_s for key, at_s in since.items() if key not in lasting}
        return _sorted(lasting)

    def _missing(self, book: Book) -> tuple[Key, ...]:
        misses = {}
        for key, entry in book.entries.items():
            if key not in self._held and self._now_s - entry.since_s >= self._worker.grace_s:
                misses[key] = self._worker.missing.get(key, 0) + self._has_turned
        lasting = [key for key, count in misses.items() if count >= NUM_MISSES]
        self._worker.missing = {key: count for key, count in misses.items() if key not in lasting}
        return _sorted(lasting)


def _sorted(keys: list[Key]) -> tuple[Key, ...]:
    return tuple(sorted(keys, key=lambda key: (key.request, key.attempt)))
