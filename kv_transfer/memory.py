"""The bytes of a KV pool: where they come from and whether they fit.

Owns allocation (huge private pages, or a sealed memfd) and the check against the machine's and the cgroup's limits;
knows no blocks. Invariant: memory handed out fits what was available, its first part is touched and the rest is being
touched in the background from low addresses up, and it has no name in /dev/shm, so nothing outlives its holders.

Touching is as fast as the machine: where a hypervisor has to find the pages first, 5 GB can take ten seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import threading
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pdserve.errors import ConfigError
from pdserve.machine import available_memory_bytes

HUGE_PAGE_BYTES = 2 * 1024 * 1024
SMALL_PAGE_BYTES = mmap.PAGESIZE
F_SEAL_FUTURE_WRITE = 0x10  # the owner's mapping stays writable, none made later is
TOUCHED_AT_ONCE_BYTES = 512 * 1024 * 1024
_TOUCH_STEP_BYTES = 32 * 1024 * 1024
_MADV_POPULATE_WRITE = 23

_libc = ctypes.CDLL(None, use_errno=True)  # unlike mmap.madvise, a call through ctypes lets other threads run
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

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


class Memory(Protocol):
    """Where a pool's bytes are: this machine's memory, or a device's."""

    @property
    def address(self) -> int:
        """In this process's address space; 0 when the bytes are not there."""

    @property
    def page_kind(self) -> str: ...

    def read(self, offset: int, num_bytes: int) -> ByteArray:
        """The bytes as they are now; perhaps a view, so use them before they change."""

    def write(self, offset: int, data: ByteArray) -> None: ...

    def close(self) -> None: ...


class PoolMemory:
    """Bytes at a fixed address; freed when the last view of `buffer` is gone."""

    __slots__ = ("address", "buffer", "fd", "page_kind")

    def __init__(self, buffer: ByteArray, fd: int | None) -> None:
        self.buffer = buffer
        self.address: int = buffer.ctypes.data
        self.fd = fd  # of the memfd, None when private
        self.page_kind = _page_kind(self.address, min(len(buffer), TOUCHED_AT_ONCE_BYTES))

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
            _advise(mapping, offset, size)
            _touch(mapping, offset, min(size, TOUCHED_AT_ONCE_BYTES))
            if fd is not None:
                seal(fd)
        except OSError as error:
            if fd is not None:
                os.close(fd)
            raise ConfigError(f"cannot take {_gib(num_bytes)} for the KV pool: {error}") from error
        if size > TOUCHED_AT_ONCE_BYTES:
            rest = (mapping, offset + TOUCHED_AT_ONCE_BYTES, size - TOUCHED_AT_ONCE_BYTES)
            threading.Thread(target=_touch_idly, args=rest, name="touch-pool", daemon=True).start()
        return cls(np.frombuffer(mapping, dtype=np.uint8)[offset : offset + num_bytes], fd)

    def read(self, offset: int, num_bytes: int) -> ByteArray:
        return self.buffer[offset : offset + num_bytes]

    def write(self, offset: int, data: ByteArray) -> None:
        self.buffer[offset : offset + len(data)] = data

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


def _advise(mapping: mmap.mmap, offset: int, size: int) -> None:
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK, mmap.MADV_DONTDUMP):
        try:
            mapping.madvise(advice, offset, size)
        except OSError as error:
            if error.errno != errno.EINVAL:  # this kernel or this kind of memory does not know it
                raise


def _touch(mapping: mmap.mmap, offset: int, size: int) -> None:
    """Have every page of the range; its bytes stay as they are."""
    address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data + offset
    if _libc.madvise(address, size, _MADV_POPULATE_WRITE) == 0:
        return
    number = ctypes.get_errno()
    if number != errno.EINVAL:  # Linux before 5.14 does not know it
        raise OSError(number, os.strerror(number))
    np.frombuffer(mapping, dtype=np.uint8)[offset : offset + size : SMALL_PAGE_BYTES] |= 0


def _touch_idly(mapping: mmap.mmap, offset: int, size: int) -> None:
    """As `_touch`, in small steps of a thread that runs only when nobody else wants the core."""
    with contextlib.suppress(OSError):  # without the right to lower itself it competes, but it ends soon
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
    for start in range(offset, offset + size, _TOUCH_STEP_BYTES):
        with contextlib.suppress(OSError):  # memory has run out meanwhile: whoever needs the page will meet that
            _touch(mapping, start, min(_TOUCH_STEP_BYTES, offset + size - start))


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
