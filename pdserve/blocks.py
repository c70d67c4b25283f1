"""Block pool: who holds which KV blocks, and nothing else.

A block is an index; this module never touches a tensor, so it is tested without torch. Block 0 is the null block
and is never given out. A holder is any hashable name with an ordered table of blocks.
Invariant: every other block is free, cached (idle, evictable), held by at least one holder, landing (being written
by a read, one holder) or draining (its holder is gone, an operation may still touch it). `check()` proves it.

Generations: `on_recycle(block)` is called exactly when a block enters the free list (freed, evicted, reclaimed, or
done draining), and a fresh block comes only from the free list. So between the moment others could last read a
block and the moment it may be written again, its owner has always had the call to bump the generation.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence

from pdserve.messages import Counts
from pdserve.prefix import CacheChanges, CacheIndex


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int, on_recycle: Callable[[int], None] | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._on_recycle = on_recycle
        self._free = deque(range(1, num_blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached, not held; least recently used first
        self._index = CacheIndex(block_size)
        self._tables: dict[Hashable, list[int]] = {}
        self._num_holders = [0] * num_blocks
        self._num_held = 0  # blocks with a holder, landing ones included
        self._landing: set[int] = set()
        self._draining: dict[Hashable, list[int]] = {}
        self._num_draining = 0
        self._reclaimable: OrderedDict[Hashable, None] = OrderedDict()  # holders that only ask, oldest first
        self.num_evicted = 0
        self.num_reclaimed = 0

    # looking

    @property
    def usable(self) -> int:
        """Blocks that a holder could ever have: all but the null block."""
        return self.num_blocks - 1

    @property
    def available(self) -> int:
        """Blocks that can be taken at once without touching any holder."""
        return len(self._free) + len(self._idle)

    def counts(self) -> Counts:
        landing = len(self._landing)
        return Counts(
            free=len(self._free),
            cached=len(self._idle),
            held=self._num_held - landing,
            landing=landing,
            draining=self._num_draining,
        )

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def table(self, holder: Hashable) -> list[int]:
        """The holder's blocks in order; a live list, to read only."""
        return self._tables[holder]

    def holds(self, holder: Hashable) -> bool:
        return holder in self._tables

    def is_draining(self, holder: Hashable) -> bool:
        return holder in self._draining

    def match(self, digests: Sequence[bytes], tokens: Sequence[int]) -> list[int]:
        """The blocks of the longest cached prefix, verified against token ids. Pins nothing."""
        return self._index.match(digests, tokens)

    def estimate_cached(self, digests: Sequence[bytes]) -> int:
        """About how many leading blocks are cached, cheaply: for ordering a queue only."""
        return self._index.estimate(digests)

    # taking

    def admit(
        self, holder: Hashable, digests: Sequence[bytes], tokens: Sequence[int], num_blocks: int, landing: bool = False
    ) -> int | None:
        """Give `holder` a table of `num_blocks`: the cached prefix pinned, the rest fresh. All of it or nothing.

        Fresh blocks come from the free list, then idle cache (least recently used first), then reclaimable holders.
        Returns the number of leading cached blocks, or None if it does not fit, and then nothing has changed.
        `digests` are those that may be served from the cache; with `landing` the fresh blocks are to be read into.
        """
        assert holder not in self._tables, holder
        matched = self._index.match(digests[:num_blocks], tokens)
        num_fresh = num_blocks - len(matched)
        if not self._can_take(num_fresh, matched):
            return None
        for block in matched:
            self._pin(block)
        fresh = self._take(num_fresh)
        if landing:
            self._landing.update(fresh)
        self._tables[holder] = matched + fresh
        return len(matched)

    def grow(self, holder: Hashable, num_blocks: int = 1) -> bool:
        """Append fresh blocks to the holder's table, all or none; same sources in the same order as `admit`."""
        if not self._can_take(num_blocks, ()):
            return False
        table = self._tables[holder]
        table.extend(self._take(num_blocks))
        return True

    def share(self, holder: Hashable, blocks: Sequence[int]) -> None:
        """A new holder of blocks that are held already, none of them landing."""
        assert holder not in self._tables, holder
        for block in blocks:
            assert self._num_holders[block] > 0 and block not in self._landing, (holder, block)
            self._num_holders[block] += 1
        self._tables[holder] = list(blocks)

    def rename(self, holder: Hashable, new_holder: Hashable) -> None:
        assert new_holder not in self._tables, new_holder
        self._tables[new_holder] = self._tables.pop(holder)

    # giving back

    def release(self, holder: Hashable) -> bool:
        """The holder lets go: blocks nobody else holds become cached if they have a digest, else free.

        False, and nothing happens, for an unknown holder: releasing twice is harmless.
        """
        table = self._tables.pop(holder, None)
        if table is None:
            return False
        self._reclaimable.pop(holder, None)
        for block in reversed(table):  # tails become the least recently used: a prefix outlives what hangs on it
            self._drop(block)
        return True

    def drain(self, holder: Hashable) -> int:
        """The holder is gone but an operation may still touch its own blocks: they wait for `quiescent(holder)`.

        Blocks with a digest or with other holders are not written by anybody and are released at once.
        Returns how many blocks drain.
        """
        table = self._tables.pop(holder, None)
        if table is None:
            return 0
        self._reclaimable.pop(holder, None)
        draining = []
        for block in reversed(table):
            if self._num_holders[block] == 1 and block not in self._index:
                self._num_holders[block] = 0
                self._num_held -= 1
                self._landing.discard(block)
                draining.append(block)
            else:
                self._drop(block)
        if draining:
            self._draining.setdefault(holder, []).extend(draining)
            self._num_draining += len(draining)
        return len(draining)

    def quiescent(self, holder: Hashable) -> int:
        """Nothing touches the blocks that `holder` left behind: they are free. Returns how many; idempotent."""
        blocks = self._draining.pop(holder, [])
        self._num_draining -= len(blocks)
        for block in blocks:
            self._recycle(block)
        return len(blocks)

    def set_reclaimable(self, holder: Hashable, reclaimable: bool) -> None:
        """A reclaimable holder keeps its blocks, intact, until an admission finds nothing else to take."""
        if reclaimable and holder in self._tables:
            self._reclaimable.setdefault(holder, None)
        elif not reclaimable:
            self._reclaimable.pop(holder, None)

    # cache and landing

    def landed(self, holder: Hashable) -> None:
        """Everything the holder was reading has been validated: its landing blocks are ordinary held blocks."""
        self._landing.difference_update(self._tables[holder])

    def cache(self, block: int, digest: bytes, tokens: Sequence[int]) -> bool:
        """Name a full block whose computation has completed. False if another block has that digest already:
        then this one stays unnamed, since a published block is never remapped."""
        assert self._num_holders[block] > 0 and block not in self._landing, block
        known = self._index.find(digest)
        if known is None:
            self._index.store(block, digest, tokens)
        return known is None or known == block

    def forget(self, digest: bytes) -> None:
        """Take a digest out of the cache; its block is free unless somebody holds it. Unknown digests are ignored."""
        block = self._index.find(digest)
        if block is None:
            return
        self._index.remove(block)
        if not self._num_holders[block]:
            del self._idle[block]
            self._recycle(block)

    def evict_all(self) -> None:
        """Forget every idle cached block."""
        while self._idle:
            self._evict()

    def take_events(self) -> CacheChanges:
        """What entered and left the cache since the last call."""
        return self._index.take_events()

    def snapshot(self) -> CacheChanges:
        """Everything that is cached, as stored; no change is pending afterwards."""
        return self._index.snapshot()

    def check(self) -> None:
        """Prove the invariant, in O(pool); an AssertionError carries the numbers."""
        self._index.check()
        holders = Counter(block for table in self._tables.values() for block in table)
        assert all(len(set(table)) == len(table) for table in self._tables.values()), "a block twice in one table"
        assert [holders[block] for block in range(self.num_blocks)] == self._num_holders, holders
        held = set(holders)
        draining = [block for blocks in self._draining.values() for block in blocks]
        assert self._num_held == len(held) and self._num_draining == len(draining), (self._num_held, len(held))
        states = [*self._free, *self._idle, *held, *draining]
        assert sorted(states) == list(range(1, self.num_blocks)), Counter(states).most_common(3)
        assert self._landing <= held and all(holders[block] == 1 for block in self._landing), self._landing
        unnamed = [*self._free, *draining, *self._landing]
        assert not any(block in self._index for block in unnamed), "a block nobody may read has a digest"
        assert all(block in self._index for block in self._idle), "an idle block has no digest"
        assert all(holder in self._tables for holder in self._reclaimable), self._reclaimable

    # inside

    def _can_take(self, num_blocks: int, pinned: Sequence[int]) -> bool:
        available = self.available - sum(1 for block in pinned if not self._num_holders[block])
        if num_blocks <= available:
            return True
        if not self._reclaimable:
            return False
        asked = Counter(block for holder in self._reclaimable for block in self._tables[holder])
        kept = set(pinned)
        spare = sum(1 for block, num in asked.items() if num == self._num_holders[block] and block not in kept)
        return num_blocks <= available + spare

    def _take(self, num_blocks: int) -> list[int]:
        while len(self._free) < num_blocks:
            if self._idle:
                self._evict()
            else:
                self.num_reclaimed += 1
                self.release(next(iter(self._reclaimable)))
        blocks = sorted(self._free.popleft() for _ in range(num_blocks))  # in order: neighbours move as one copy
        for block in blocks:
            self._num_holders[block] = 1
        self._num_held += num_blocks
        return blocks

    def _pin(self, block: int) -> None:
        if not self._num_holders[block]:
            del self._idle[block]
            self._num_held += 1
        self._num_holders[block] += 1

    def _drop(self, block: int) -> None:
        self._num_holders[block] -= 1
        assert self._num_holders[block] >= 0, block
        if self._num_holders[block]:
            return
        self._num_held -= 1
        self._landing.discard(block)
        if block in self._index:
            self._idle[block] = None
        else:
            self._recycle(block)

    def _evict(self) -> None:
        block, _ = self._idle.popitem(last=False)
        self._index.remove(block)
        self.num_evicted += 1
        self._recycle(block)

    def _recycle(self, block: int) -> None:
        if self._on_recycle is not None:
            self._on_recycle(block)
        self._free.append(block)
