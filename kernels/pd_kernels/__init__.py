"""Kernels behind one choice point: `select` returns the set for a device, dtype and head size, and says why.

Owns nothing else; what a set must provide is in `protocols`.
"""

from pd_kernels.protocols import DecodeBatch, KernelSet, PackedLinear, PrefillBatch
from pd_kernels.select import KernelError, describe, select

__all__ = ["DecodeBatch", "KernelError", "KernelSet", "PackedLinear", "PrefillBatch", "describe", "select"]
