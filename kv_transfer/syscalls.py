"""The Linux calls that Python does not offer, and nothing else.

`full_fence` orders memory between processes, `read_process` copies from another process's memory, and
`allow_reads_by` tells Yama who may do so. Invariant: a call that cannot do its work says so; none pretends.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt

IOV_MAX = 1024
_MEMBARRIER = {"x86_64": 324, "aarch64": 283, "riscv64": 283}
_MEMBARRIER_CMD_GLOBAL_EXPEDITED = 2
_PR_SET_PTRACER = 0x59616D61

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_machine = platform.machine()
_lock = threading.Lock()


def _can_membarrier() -> bool:
    number = _MEMBARRIER.get(_machine)
    return number is not None and _libc.syscall(number, _MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0, 0) == 0


_has_membarrier = _can_membarrier()


def full_fence() -> None:
    """Every load and store of this thread before the call is visible to all CPUs before any after it.

    membarrier(GLOBAL_EXPEDITED) runs the kernel's full barrier on the caller unconditionally and interrupts only
    processes that registered for it, of which there are none; about half a microsecond. Where a sandbox forbids it,
    x86-64 still has the locked instruction inside a lock's acquire, which also orders streaming stores.
    """
    if _has_membarrier:
        _libc.syscall(_MEMBARRIER[_machine], _MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0, 0)
    elif _machine == "x86_64":
        with _lock:
            pass
    else:
        raise OSError(errno.ENOSYS, f"no memory fence on {_machine}: the membarrier call is forbidden here")


Iovecs = npt.NDArray[np.uint64]
"""[n, 2]: address and length of each piece, at most IOV_MAX of them."""

_process_vm_readv = getattr(_libc, "process_vm_readv", None)  # not every libc has it
if _process_vm_readv is not None:
    _process_vm_readv.restype = ctypes.c_ssize_t
    _process_vm_readv.argtypes = [ctypes.c_int, *[ctypes.c_void_p, ctypes.c_ulong] * 2, ctypes.c_ulong]


def one_iovec(address: int, num_bytes: int) -> Iovecs:
    return np.array([[address, num_bytes]], dtype=np.uint64)


def read_process(pid: int, local: Iovecs, remote: Iovecs) -> int:
    """Copy the remote pieces of process `pid`, in order, into the local ones; the number of bytes copied.

    The two lists are one stream of bytes each and need not be cut alike. Raises OSError (ESRCH, EPERM, EFAULT, ENOSYS).
    """
    assert 0 < len(local) <= IOV_MAX and 0 < len(remote) <= IOV_MAX, (len(local), len(remote))
    if _process_vm_readv is None:
        raise OSError(errno.ENOSYS, "this libc has no process_vm_readv")
    copied = _process_vm_readv(pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0)
    if copied < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(copied)


def why_forbidden() -> str:
    """Why workers of this machine cannot read each other's memory; empty when they can, as far as can be told alone."""
    own, target = np.arange(8, dtype=np.uint8), np.zeros(8, dtype=np.uint8)
    try:
        read_process(os.getpid(), one_iovec(target.ctypes.data, 8), one_iovec(own.ctypes.data, 8))
    except OSError as error:
        return f"process_vm_readv fails: {error.strerror}"
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):  # no Yama here
        return ""
    return f"kernel.yama.ptrace_scope is {scope}" if scope >= 2 and os.geteuid() != 0 else ""


def allow_reads_by(pid: int) -> bool:
    """Let process `pid` and its descendants read this process's memory; False where Yama is absent and need not ask.

    Yama's ptrace_scope 1 otherwise allows only ancestors; workers are siblings, so each names their supervisor.
    """
    zero = ctypes.c_ulong(0)
    return bool(_libc.prctl(ctypes.c_int(_PR_SET_PTRACER), ctypes.c_ulong(pid), zero, zero, zero) == 0)
