"""Which published blocks go where, by position; pure arithmetic, no memory.

Owns the check of runs that came over the wire and the coalescing of block copies into few large ones.
Invariant: a block is paired with a destination by the position of its first token, never by counting what came before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pdserve.errors import TransferError
from pdserve.messages import Run

MAX_GENERATION = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What one landing needs: positions [first_missing, num_tokens), into its own block table."""

    num_tokens: int  # positions with KV: the prompt and what was generated before
    first_missing: int  # the blocks before it are held already; a block boundary
    block_size: int
    table: tuple[int, ...]  # own blocks by index: table[i] holds positions [i * block_size, (i + 1) * block_size)
    num_source_blocks: int  # of the owner's pool; ids 1 to num_source_blocks - 1 can be published

    def __post_init__(self) -> None:
        assert self.first_missing >= 0 and self.first_missing % self.block_size == 0, self
        assert len(self.table) >= self.num_blocks, self

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // self.block_size)

    @property
    def missing(self) -> range:
        """Indexes into the table that have to be read."""
        return range(self.first_missing // self.block_size, self.num_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A published block."""

    block: int
    generation: int


def check_run(run: Run, target: Target) -> None:
    """Raises TransferError (`malformed_run`) for a run that cannot belong to this request in this pool."""
    size, end = target.block_size, run.first_position + run.num_tokens
    if run.first_position < 0 or run.first_position % size:
        raise malformed(f"run starts at position {run.first_position}, not at a multiple of {size}")
    if run.num_tokens < 1 or end > target.num_tokens:
        raise malformed(f"run covers [{run.first_position}, {end}) of {target.num_tokens} positions")
    if end % size and end != target.num_tokens:
        raise malformed(f"run ends at {end}, inside a block and before the last position {target.num_tokens}")
    expected = -(-run.num_tokens // size)
    if not len(run.blocks) == len(run.generations) == expected:
        raise malformed(f"{expected} blocks expected, got {len(run.blocks)} and {len(run.generations)} generations")
    if any(not 0 < block < target.num_source_blocks for block in run.blocks):
        raise malformed(f"a block id is outside [1, {target.num_source_blocks})")
    if any(not 0 < generation <= MAX_GENERATION for generation in run.generations):
        raise malformed("a generation is not a positive 64-bit number")


class Coverage:
    """Where each position of one request was published: the union of runs that may repeat and come in any order."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._by_index: dict[int, Source] = {}
        self._index_of: dict[int, int] = {}

    def add(self, runs: Iterable[Run]) -> list[tuple[int, Source]]:
        """The (table index, source) pairs that are news and missing here. Raises TransferError, changing nothing."""
        fresh: dict[int, Source] = {}
        for run in runs:
            check_run(run, self._target)
            first = run.first_position // self._target.block_size
            for offset, (block, generation) in enumerate(zip(run.blocks, run.generations, strict=True)):
                self._note(first + offset, Source(block=block, generation=generation), fresh)
        self._by_index.update(fresh)
        self._index_of.update((source.block, index) for index, source in fresh.items())
        return [(index, fresh[index]) for index in sorted(fresh) if index in self._target.missing]

    def _note(self, index: int, source: Source, fresh: dict[int, Source]) -> None:
        known = self._by_index.get(index) or fresh.get(index)
        if known == source:
            return
        if known is not None:
            raise malformed(f"block index {index} was published as {known}, now as {source}")
        taken = self._index_of.get(source.block)
        if taken is not None or any(other.block == source.block for other in fresh.values()):
            raise malformed(f"block {source.block} is published at two positions")
        fresh[index] = source

    @property
    def is_complete(self) -> bool:
        """Whether everything missing here has been published."""
        return all(index in self._by_index for index in self._target.missing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """`count` blocks adjacent on both sides: one copy."""

    source: int
    destination: int
    count: int


def coalesce(sources: Sequence[int], destinations: Sequence[int]) -> list[Piece]:
    """Fewest pieces, in order: a piece ends where either side stops being adjacent."""
    ids = np.stack([np.asarray(sources, dtype=np.int64), np.asarray(destinations, dtype=np.int64)])
    if ids.shape[1] == 0:
        return []
    cuts = np.flatnonzero((np.diff(ids, axis=1) != 1).any(axis=0)) + 1
    bounds = [0, *cuts.tolist(), ids.shape[1]]
    return [
        Piece(source=int(ids[0, start]), destination=int(ids[1, start]), count=end - start)
        for start, end in zip(bounds, bounds[1:], strict=False)
    ]


def adjacent(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """(first block, count) of each stretch of consecutive ids, in order."""
    return [(piece.source, piece.count) for piece in coalesce(blocks, blocks)]


def malformed(message: str) -> TransferError:
    return TransferError(message, reason="malformed_run")
