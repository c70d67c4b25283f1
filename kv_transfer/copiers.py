"""Copying blocks out of another process on this host: by its pid, or through a memfd mapped read-only.

Owns the two mechanisms; judges nothing but whether all bytes were copied. Invariant: an empty reason means every byte
of every block is in the own pool; what those bytes are worth is the reader's question.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kv_transfer.memory import is_sealed
from kv_transfer.plan import adjacent, coalesce
from kv_transfer.pool import Pool
from kv_transfer.syscalls import Iovecs, read_process
from pdserve.errors import TransferError

_REASONS = {errno.ESRCH: "peer_gone", errno.EPERM: "permission", errno.ENOSYS: "permission", errno.EFAULT: "short_read"}


def reason_of(error: OSError) -> str:
    return _REASONS.get(error.errno or 0, "io_error")


class Copier(Protocol):
    how: str

    def copy(self, sources: Sequence[int], destinations: Sequence[int]) -> str:
        """Copy whole blocks into the own pool; the reason for which it did not work, or an empty string."""


class ProcessCopier:
    how = "process_vm_readv"

    def __init__(self, pool: Pool, *, pid: int, address: int) -> None:
        self._pool, self._pid, self._address = pool, pid, address

    def _iovecs(self, address: int, blocks: Sequence[int]) -> Iovecs:
        stretches = np.array(adjacent(blocks), dtype=np.uint64) * np.uint64(self._pool.block_bytes)
        stretches[:, 0] += np.uint64(address)
        return stretches

    def copy(self, sources: Sequence[int], destinations: Sequence[int]) -> str:
        local = self._iovecs(self._pool.memory.address, destinations)
        try:
            copied = read_process(self._pid, local, self._iovecs(self._address, sources))
        except OSError as error:
            return reason_of(error)
        return "" if copied == len(sources) * self._pool.block_bytes else "short_read"


class MappedCopier:
    how = "memfd"

    def __init__(self, pool: Pool, *, fd: int, total_blocks: int) -> None:
        self._pool = pool
        size = total_blocks * pool.block_bytes
        if os.fstat(fd).st_size < size or not is_sealed(fd):
            raise TransferError(f"the peer's pool is not a sealed memfd of {size} bytes", reason="bad_pool")
        mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self._bytes = np.frombuffer(mapping, dtype=np.uint8)

    def copy(self, sources: Sequence[int], destinations: Sequence[int]) -> str:
        size = self._pool.block_bytes
        for piece in coalesce(sources, destinations):
            start, end = piece.source * size, (piece.source + piece.count) * size
            self._pool.bytes_of(piece.destination, piece.count)[:] = self._bytes[start:end]
        return ""
