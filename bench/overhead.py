"""What a step costs beside its kernels: Python, tensors, and the calls into native code themselves.

Owns a stand-in for the native library whose functions return at once, so that everything around them runs as served.
Invariant: the same number of calls with the same arguments is made as in a real step; their results are not looked at.
"""

from __future__ import annotations

import ctypes
from typing import Any

from pd_kernels.cpu.attention import CpuDecode, CpuPrefill
from pd_kernels.cpu.fused import fuse
from pd_kernels.cpu.layer import CpuLayer, CpuSampling
from pd_kernels.cpu.library import Library
from pd_kernels.protocols import KernelSet


class NullLibrary:
    """The functions of `library`, doing nothing; what is not a function is the library's."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._library, name)
        if not isinstance(real, ctypes._CFuncPtr):  # type: ignore[attr-defined]
            return real
        null = ctypes.CDLL(None)["abs"]  # a fresh binding; it looks at its first argument only
        null.argtypes, null.restype = real.argtypes, None
        setattr(self, name, null)
        return null


def null_set(library: Library, like: KernelSet, dtype: Any) -> KernelSet:
    """The cpu kernels over a `NullLibrary`."""
    null: Any = NullLibrary(library)
    return KernelSet(
        name=like.name,
        why="nothing is computed",
        prefill=CpuPrefill(null),
        decode=CpuDecode(null),
        layer=CpuLayer(null, dtype),
        sampling=CpuSampling(null),
        fuse=lambda layers, shape: fuse(null, layers, shape, dtype),
    )
