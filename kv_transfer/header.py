"""Generations: how a reader knows that the bytes it copied are still the ones that were published.

Owns the shared header of a pool (its epoch and one 64-bit generation per block); knows nothing of bytes or leases.
Invariant: a generation is raised, and a full fence passed, *before* its block may be freed or rewritten; the reader
copies, passes a full fence, then compares. So equal generations afterwards prove that no byte was rewritten meanwhile.

Why this holds in Python: a generation is an aligned 8-byte word, which numpy stores with one instruction, so it is seen
old or new, never torn; the fence (`syscalls.full_fence`) keeps later stores to the block, streaming ones included,
behind it. Layout, little endian: magic 8, version 4, 0 4, number of blocks 8, 0 8, epoch digest 16, 0 16, generations.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kv_transfer.memory import is_sealed, seal
from kv_transfer.syscalls import full_fence
from pdserve.errors import TransferError

HEADER_BYTES = 64
_FIXED = struct.Struct("<8sIIQ")
_EPOCH = slice(32, 48)
_MAGIC = b"PDKVGEN\0"
_VERSION = 1


def _digest(epoch: str) -> bytes:
    return hashlib.blake2b(epoch.encode(), digest_size=16).digest()


class GenerationHeader:
    """The owner's side. Block ids from `num_blocks` up are fixed: never rewritten, at generation 1 for ever."""

    def __init__(self, *, num_blocks: int, epoch: str, num_fixed: int = 0) -> None:
        self.num_blocks = num_blocks
        total = num_blocks + num_fixed
        size = HEADER_BYTES + 8 * total
        self.fd = os.memfd_create("pdserve-generations", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        self._map = mmap.mmap(self.fd, size, flags=mmap.MAP_SHARED)
        self._generations: npt.NDArray[np.uint64] = np.frombuffer(self._map, dtype=np.uint64, offset=HEADER_BYTES)
        self._generations[:] = 1
        self._map[: _FIXED.size] = _FIXED.pack(_MAGIC, _VERSION, 0, total)
        self._map[_EPOCH] = _digest(epoch)
        self.epoch = epoch
        seal(self.fd)
        full_fence()

    def bump(self, *blocks: int) -> None:
        """These blocks are about to be freed or rewritten; returns once every later store is ordered behind that."""
        for block in blocks:
            assert 0 <= block < self.num_blocks, (block, self.num_blocks)
            self._generations[block] += np.uint64(1)
        full_fence()

    def bump_all(self) -> None:
        self._generations[: self.num_blocks] += np.uint64(1)
        full_fence()

    def set_epoch(self, epoch: str) -> None:
        """Start a new life: whatever was published in the old one can no longer be read.

        The name changes before the generations, so that a reader who sees a generation of the new life sees its name.
        """
        self._map[_EPOCH] = _digest(epoch)
        self.epoch = epoch
        full_fence()
        self.bump_all()

    def generation(self, block: int) -> int:
        return int(self._generations[block])

    def generations(self, blocks: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._generations[np.asarray(blocks, dtype=np.int64)].tolist())

    def why_invalid(self, epoch: str, blocks: Sequence[int], generations: Sequence[int]) -> str | None:
        """As `HeaderView.why_invalid`, for a server that reads on somebody's behalf inside the owner's process."""
        full_fence()
        is_equal = _equal(self._generations, blocks, generations)
        if epoch != self.epoch:
            return "epoch"
        return None if is_equal else "stale_generation"

    def close(self) -> None:
        os.close(self.fd)


class HeaderView:
    """The reader's side: the same memory, mapped read-only."""

    def __init__(self, fd: int, *, total_blocks: int) -> None:
        """Maps `fd`, which stays the caller's; raises TransferError (`bad_header`) for anything but a sound header."""
        size = HEADER_BYTES + 8 * total_blocks
        if os.fstat(fd).st_size != size or not is_sealed(fd):
            raise TransferError(f"the header is not a sealed memfd of {size} bytes", reason="bad_header")
        self._map = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        if _FIXED.unpack(self._map[: _FIXED.size]) != (_MAGIC, _VERSION, 0, total_blocks):
            raise TransferError("the header is of another kind, version or size", reason="bad_header")
        self._generations: npt.NDArray[np.uint64] = np.frombuffer(self._map, dtype=np.uint64, offset=HEADER_BYTES)

    def why_invalid(self, epoch: str, blocks: Sequence[int], generations: Sequence[int]) -> str | None:
        """None when all of it still holds, else `epoch` or `stale_generation`. Call it after the bytes have arrived."""
        full_fence()
        is_equal = _equal(self._generations, blocks, generations)
        full_fence()
        if self._map[_EPOCH] != _digest(epoch):
            return "epoch"
        return None if is_equal else "stale_generation"


def _equal(current: npt.NDArray[np.uint64], blocks: Sequence[int], generations: Sequence[int]) -> bool:
    """Whether every block has its generation; ids out of range or lists of unequal length never do."""
    ids, wanted = np.asarray(blocks, dtype=np.int64), np.asarray(generations, dtype=np.uint64)
    if len(ids) != len(wanted):
        return False
    if len(ids) and (ids.min() < 0 or ids.max() >= len(current)):
        return False
    return bool((current[ids] == wanted).all())
