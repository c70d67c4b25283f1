"""A queue whose order is a policy and whose patience is bounded.

Owns who is offered next and how often each entry has been overtaken; does not know what admission means.
Invariant: an entry overtaken `max_overtakes` times is offered first, and until it is admitted nobody passes it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeVar

T = TypeVar("T")
Rank = tuple[int, ...]


class Verdict(Enum):
    ADMITTED = auto()  # it leaves the queue
    BLOCKED = auto()  # does not fit now; others may pass it, up to the bound
    DEFERRED = auto()  # waits for something that is under way; who passes it does not overtake it
    STOP = auto()  # nobody can be admitted any more this time


@dataclass(slots=True)
class _Entry(Generic[T]):
    item: T
    overtaken: int = 0
    is_deferred: bool = False


class Waiting(Generic[T]):
    def __init__(self, max_overtakes: int) -> None:
        self._max_overtakes = max_overtakes
        self._entries: dict[Hashable, _Entry[T]] = {}  # in order of arrival

    def add(self, key: Hashable, item: T) -> None:
        self._entries.setdefault(key, _Entry(item))

    def pop(self, key: Hashable) -> T | None:
        entry = self._entries.pop(key, None)
        return None if entry is None else entry.item

    def offer(self, rank: Callable[[T], Rank], admit: Callable[[T], Verdict]) -> None:
        """Offer entries to `admit`, lowest rank first and ties in order of arrival; those past the bound before all."""
        while self._offer_once(rank, admit):
            pass

    def _offer_once(self, rank: Callable[[T], Rank], admit: Callable[[T], Verdict]) -> bool:
        """True if an admission put somebody past the bound: the order has changed."""
        due = [key for key, entry in self._entries.items() if self._is_due(entry)]
        rest = [key for key, entry in self._entries.items() if not self._is_due(entry)]
        for key in [*due, *sorted(rest, key=lambda key: rank(self._entries[key].item))]:
            entry = self._entries[key]
            verdict = admit(entry.item)
            entry.is_deferred = verdict is Verdict.DEFERRED
            if verdict is Verdict.STOP or (verdict is Verdict.BLOCKED and self._is_due(entry)):
                return False
            if verdict is Verdict.ADMITTED and self._leave(key):
                return True
        return False

    def _leave(self, key: Hashable) -> bool:
        became_due = False
        for other, entry in self._entries.items():
            if other == key:
                break
            if not entry.is_deferred:
                entry.overtaken += 1
                became_due |= entry.overtaken == self._max_overtakes
        del self._entries[key]
        return became_due

    def _is_due(self, entry: _Entry[T]) -> bool:
        return entry.overtaken >= self._max_overtakes

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        return (entry.item for entry in self._entries.values())
