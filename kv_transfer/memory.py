"""The bytes of a KV pool: where they come from and whether they fit.

Owns allocation (huge private pages, or a sealed memfd) and the check against the machine's and the cgroup's limits;
knows no blocks. Invariant: memory handed out is already touched, so no later write can fail, and has no name in
/dev/shm, so nothing outlives the processes that hold it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pdserve.errors import ConfigError
from pdserve.machine import available_memory_bytes

HUGE_PAGE_BYTES = 2 * 1024 * 1024
SMALL_PAGE_BYTES = mmap.PAGESIZE
F_SEAL_FUTURE_WRITE = 0x10  # the owner's mapping stays writable, none made later is
_MADV_POPULATE_WRITE = 23

ByteArray = npt.NDArray[np.uint8]


def check_fits(num_bytes: int, available_bytes: int) -> None:
    """Raises ConfigError, naming both numbers, when the pool is larger than what is left."""
    if num_bytes > available_bytes:
        raise ConfigError(
            f"the KV pool needs {_gib(num_bytes)}, but only {_gib(available_bytes)} of memory is available; "
            "lower --kv-memory-gb or --kv-blocks"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


class PoolMemory:
    """Touched bytes at a fixed address; freed when the last view of `buffer` is gone."""

    __slots__ = ("address", "buffer", "fd", "page_kind")

    def __init__(self, buffer: ByteArray, fd: int | None) -> None:
        self.buffer = buffer
        self.address: int = buffer.ctypes.data
        self.fd = fd  # of the memfd, None when private
        self.page_kind = _page_kind(self.address, len(buffer))

    @classmethod
    def allocate(cls, num_bytes: int, *, shared: bool) -> PoolMemory:
        """Take `num_bytes`, private with huge pages or as a sealed memfd; raises ConfigError when they do not fit."""
        assert num_bytes > 0, num_bytes
        check_fits(num_bytes, available_memory_bytes())
        size = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        fd = None
        try:
            if shared:
                fd = os.memfd_create("pdserve-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                os.ftruncate(fd, size)
                mapping, offset = mmap.mmap(fd, size, flags=mmap.MAP_SHARED), 0
            else:
                mapping = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                offset = -np.frombuffer(mapping, dtype=np.uint8).ctypes.data % HUGE_PAGE_BYTES
            _touch(mapping, offset, size)
            if fd is not None:
                seal(fd)
        except OSError as error:
            if fd is not None:
                os.close(fd)
            raise ConfigError(f"cannot take {_gib(num_bytes)} for the KV pool: {error}") from error
        return cls(np.frombuffer(mapping, dtype=np.uint8)[offset : offset + num_bytes], fd)

    def close(self) -> None:
        """Close the memfd, if any; mappings stay as long as somebody uses them."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def seal(fd: int) -> None:
    """Nobody may resize the memfd any more, nor map it writable from now on."""
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | F_SEAL_FUTURE_WRITE)
    except OSError:  # Linux before 5.1
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def is_sealed(fd: int) -> bool:
    """Whether mapping all of it can never fault."""
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & seals == seals


def _touch(mapping: mmap.mmap, offset: int, size: int) -> None:
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK, mmap.MADV_DONTDUMP):
        try:
            mapping.madvise(advice, offset, size)
        except OSError as error:
            if error.errno != errno.EINVAL:  # this kernel or this kind of memory does not know it
                raise
    try:
        mapping.madvise(_MADV_POPULATE_WRITE, offset, size)
    except OSError as error:
        if error.errno != errno.EINVAL:  # Linux before 5.14
            raise
        np.frombuffer(mapping, dtype=np.uint8)[offset : offset + size : SMALL_PAGE_BYTES] = 0


def _page_kind(address: int, num_bytes: int) -> str:
    """The page size in use as the kernel reports it for this range, with the share where pages are mixed."""
    huge_kib, inside = 0, False
    with Path("/proc/self/smaps").open() as lines:
        for line in lines:
            if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                inside = int(match[1], 16) < address + num_bytes and int(match[2], 16) > address
            elif inside and line.startswith(("AnonHugePages:", "ShmemPmdMapped:")):
                huge_kib += int(line.split()[1])
    share = min(1.0, huge_kib * 1024 / num_bytes)
    if share >= 0.9:
        return "2 MiB"
    return f"{SMALL_PAGE_BYTES // 1024} KiB" if share < 0.1 else f"2 MiB ({share:.0%})"
