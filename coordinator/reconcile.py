"""What a worker says it holds, against what the core thinks it holds (law 11).

Owns the comparison, heartbeat by heartbeat; acting on it is the machine's. Heartbeats overtake the session's messages,
so a difference counts only when it is seen twice in a row, and a missing key only once the worker's loop has turned.
Invariant: comparing changes nothing but the memory of the last heartbeat.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.ledger import Book
from coordinator.workers import Worker
from pdserve.messages import Heartbeat, Key

NUM_GRACE = 2  # heartbeats before a new entry can be missed, and misses in a row that count


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    strangers: tuple[Key, ...]  # held there without business: drop again
    missing: tuple[Key, ...]  # promised there, and not there


def compare(worker: Worker, heartbeat: Heartbeat, book: Book, wanted: frozenset[Key]) -> Differences:
    """`wanted` are the keys in `book` that belong to a present placement; the others wait to be released."""
    has_turned = worker.heartbeat is not None and heartbeat.step > worker.heartbeat.step
    worker.heartbeat = heartbeat
    worker.num_heartbeats += 1
    held = frozenset(heartbeat.held) | frozenset(heartbeat.leases)
    strangers = held - wanted
    again = strangers & worker.strangers
    worker.strangers = set(strangers - again)
    seen = {key: count for key, count in worker.missing.items() if key in book.entries and key not in held}
    for key in book.entries:
        if key not in held and (key not in seen or has_turned):
            seen[key] = seen.get(key, 0) + 1
    missing = [key for key, count in seen.items() if count >= 2 * NUM_GRACE]
    worker.missing = {key: count for key, count in seen.items() if key not in missing}
    return Differences(strangers=tuple(sorted(again, key=_order)), missing=tuple(sorted(missing, key=_order)))


def _order(key: Key) -> tuple[str, int]:
    return (key.request, key.attempt)
