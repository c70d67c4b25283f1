"""Which prefix blocks each worker has cached, as far as the core knows.

Owns hints per epoch, fed by `CacheEvents`; a hint only steers the router, workers verify for themselves.
Invariant: an index is used only while its event numbers have no gap; after one it is empty until a snapshot comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.messages import CacheEvents


@dataclass(slots=True)
class _Known:
    digests: set[bytes] = field(default_factory=set)
    next_number: int | None = None  # of the next message; None: whatever comes
    is_resyncing: bool = False


class PrefixIndex:
    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def open(self, epoch: str) -> None:
        self._known[epoch] = _Known()

    def close(self, epoch: str) -> None:
        self._known.pop(epoch, None)

    def apply(self, epoch: str, events: CacheEvents) -> bool:
        """False: a message is missing, and the worker must send a snapshot. Asked once per gap.

        `first` numbers an epoch's messages, snapshots included.
        """
        known = self._known.get(epoch)
        if known is None:
            return True
        if events.is_snapshot:
            self._known[epoch] = _Known(set(events.stored), events.first + 1)
            return True
        if known.is_resyncing:
            return True
        if known.next_number is not None and events.first != known.next_number:
            self._known[epoch] = _Known(is_resyncing=True)
            return False
        known.digests.update(events.stored)
        known.digests.difference_update(events.removed)
        known.next_number = events.first + 1
        return True

    def num_leading(self, epoch: str, digests: Sequence[bytes]) -> int:
        """How many leading blocks of a prompt the worker has cached."""
        known = self._known.get(epoch)
        if known is None:
            return 0
        for count, digest in enumerate(digests):
            if digest not in known.digests:
                return count
        return len(digests)

    def size(self, epoch: str) -> int:
        known = self._known.get(epoch)
        return 0 if known is None else len(known.digests)
