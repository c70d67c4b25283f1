"""Who is computing which block, so that a prefix that several requests share is computed once.

Owns the owner and the waiters of each digest in work; does not own blocks or queues.
Invariant: a digest with waiters has an owner; when the owner ends, the oldest waiter owns it in the same event.
"""

from __future__ import annotations

from collections.abc import Hashable


class Computing:
    def __init__(self) -> None:
        self._owner: dict[bytes, Hashable] = {}
        self._waiters: dict[bytes, dict[Hashable, None]] = {}  # in order of arrival
        self._owned: dict[Hashable, set[bytes]] = {}
        self._awaited: dict[Hashable, set[bytes]] = {}

    def claim(self, digest: bytes, who: Hashable) -> bool:
        """True if `who` computes `digest`, now or already; False if another does, and `who` is in line."""
        owner = self._owner.setdefault(digest, who)
        if owner == who:
            self._owned.setdefault(who, set()).add(digest)
            return True
        self._waiters.setdefault(digest, {})[who] = None
        self._awaited.setdefault(who, set()).add(digest)
        return False

    def done(self, digest: bytes) -> None:
        """The block is cached: nobody owns it or waits for it any more. Unknown digests are ignored."""
        owner = self._owner.pop(digest, None)
        if owner is not None:
            self._forget(self._owned, owner, digest)
        for waiter in self._waiters.pop(digest, ()):
            self._forget(self._awaited, waiter, digest)

    def leave(self, who: Hashable) -> list[Hashable]:
        """`who` ended or no longer computes: returns those that became owners in its place."""
        for digest in self._awaited.pop(who, ()):
            self._waiters[digest].pop(who)
            if not self._waiters[digest]:
                del self._waiters[digest]
        heirs: dict[Hashable, None] = {}
        for digest in self._owned.pop(who, ()):
            waiters = self._waiters.get(digest)
            if not waiters:
                del self._owner[digest]
                continue
            heir = next(iter(waiters))
            del waiters[heir]
            if not waiters:
                del self._waiters[digest]
            self._forget(self._awaited, heir, digest)
            self._owner[digest] = heir
            self._owned.setdefault(heir, set()).add(digest)
            heirs[heir] = None
        return list(heirs)

    def owner(self, digest: bytes) -> Hashable | None:
        return self._owner.get(digest)

    def __len__(self) -> int:
        return len(self._owner)

    def check(self) -> None:
        owned = {digest: who for who, digests in self._owned.items() for digest in digests}
        assert owned == self._owner, (owned, self._owner)
        awaited = {(digest, who) for who, digests in self._awaited.items() for digest in digests}
        assert awaited == {(digest, who) for digest, line in self._waiters.items() for who in line}, awaited
        assert set(self._waiters) <= set(self._owner), "a digest has waiters and no owner"

    @staticmethod
    def _forget(index: dict[Hashable, set[bytes]], who: Hashable, digest: bytes) -> None:
        index[who].discard(digest)
        if not index[who]:
            del index[who]
