"""Leases: until when the owner of blocks promises to keep them for a reader.

Owns deadlines; the blocks belong to the pool, where a lease is the holder of the same name.
Invariant: a lease only obliges. An expired one is not freed: its blocks stay intact and become reclaimable after
idle cache, and a renewal that comes before that makes it whole again. Safety never rests on a lease.
"""

from __future__ import annotations

from collections.abc import Hashable

from pdserve.blocks import BlockPool


class Leases:
    def __init__(self, pool: BlockPool, ttl_s: float) -> None:
        self._pool = pool
        self._ttl_s = ttl_s
        self._deadline_s: dict[Hashable, float] = {}
        self.num_expired = 0  # in normal operation a bug, so it is counted

    def grant(self, holder: Hashable, now_s: float) -> None:
        """`holder`, which has blocks in the pool, becomes a lease."""
        self._deadline_s[holder] = now_s + self._ttl_s

    def renew(self, holder: Hashable, now_s: float) -> bool:
        """False if there is no such lease, or its blocks have been reclaimed."""
        if holder not in self:
            return False
        self._deadline_s[holder] = now_s + self._ttl_s
        self._pool.set_reclaimable(holder, False)
        return True

    def release(self, holder: Hashable) -> bool:
        """Give the blocks back. False if there is no such lease; releasing twice is harmless."""
        if self._deadline_s.pop(holder, None) is None:
            return False
        return self._pool.release(holder)

    def expire(self, now_s: float) -> list[Hashable]:
        """Make overdue leases reclaimable; returns those that became so now. Forgets leases that were reclaimed."""
        for holder in [holder for holder in self._deadline_s if holder not in self]:
            del self._deadline_s[holder]
        overdue = [holder for holder, at in self._deadline_s.items() if at <= now_s]
        for holder in overdue:
            self._pool.set_reclaimable(holder, True)
            self._deadline_s[holder] = float("inf")
        self.num_expired += len(overdue)
        return overdue

    def holders(self) -> list[Hashable]:
        return [holder for holder in self._deadline_s if holder in self]

    def __contains__(self, holder: Hashable) -> bool:
        return holder in self._deadline_s and self._pool.holds(holder)

    def __len__(self) -> int:
        return len(self.holders())
