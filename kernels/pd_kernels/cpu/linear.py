"""Linear layers on CPU: one copy of the weights, in huge pages, in the layout the machine reads fastest.

bfloat16 on a CPU with AMX: packed tiles, any number of rows. Otherwise row-major, so that the native kernel serves few
rows and torch (oneDNN, MKL) many from the same memory. Int8 weights: tiles or row-major likewise, any number of rows.
Invariant: never more than one copy of a weight; sums are float32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pd_kernels.cpu.arena import Arena, Reused
from pd_kernels.cpu.library import Library
from pd_kernels.int8 import Int8Linear, quantize
from pd_kernels.protocols import PackedLinear

TILES, INT8_TILES, ROWS, INT8_ROWS = range(4)  # pd::LinearPart::Kind
ANY_ROWS = 1 << 30
DEPTH = 32  # in_features must be a multiple of it; others go through torch
FEW_ROWS = {torch.bfloat16: 32, torch.float32: 8}  # up to here the row-major kernel beats torch's linear


def pack(library: Library, arena: Arena, weight: Tensor, bias: Tensor | None, float32_out: bool) -> PackedLinear:
    """The fastest linear for `weight` [out_features, in_features]; the caller may drop its copy afterwards."""
    n, k = weight.shape
    if weight.dtype is torch.bfloat16 and library.has_amx and k % DEPTH == 0:
        packed = arena.empty((-(-n // 32) * 32 * k,), weight.dtype)
        source = weight.contiguous()
        library.pack_tiles(source.data_ptr(), packed.data_ptr(), n, k)
        return TileLinear(library, packed, (n, k), bias, float32_out)
    rows = arena.empty((n, k), weight.dtype)
    rows.copy_(weight)
    return RowLinear(library, rows, bias, float32_out)


def pack_int8(library: Library, arena: Arena, weight: Tensor, bias: Tensor | None, float32_out: bool) -> PackedLinear:
    """The same, `weight` rounded to integers; in_features that are no multiple of 32 stay with torch."""
    n, k = weight.shape
    if k % DEPTH:
        return Int8Linear(weight, bias, float32_out)
    integers, scale = quantize(weight)
    if weight.dtype is torch.bfloat16 and library.has_amx:
        packed = arena.empty((-(-n // 32) * 32 * k,), torch.int8)
        library.pack_int8_tiles(integers.data_ptr(), packed.data_ptr(), n, k)
    else:
        packed = arena.empty((n, k), torch.int8)
        packed.copy_(integers)
    return NativeInt8Linear(library, packed, (n, k), (scale, bias), (weight.dtype, float32_out))


class NativeLinear:
    """What a native walk through a decoder needs of a linear layer whose outputs have the dtype of its inputs."""

    native: tuple[int, int, int | None, int | None, int, int]  # kind (decoder.h), weight, scale, bias, n, k
    most_rows: int  # up to here the native kernel is the one to use
    _reused: Reused | None = None  # of results in float32

    def _out(self, rows: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((rows, self.native[4]), dtype=dtype) if self._reused is None else self._reused.empty(rows)


class TileLinear(NativeLinear):
    """AMX over packed tiles."""

    def __init__(
        self, library: Library, packed: Tensor, shape: tuple[int, int], bias: Tensor | None, float32_out: bool
    ) -> None:
        self._call, self._packed = library.linear_tiles, packed
        self._n, self._k = shape
        self._bias = None if bias is None else bias.float().contiguous()
        self._pointers = (packed.data_ptr(), None if self._bias is None else self._bias.data_ptr())
        self._dtype = torch.float32 if float32_out else torch.bfloat16
        self._wide = int(float32_out)
        self.native, self.most_rows = (TILES, self._pointers[0], None, self._pointers[1], *shape), ANY_ROWS
        self._reused = Reused(shape[0], torch.float32) if float32_out else None

    def __call__(self, x: Tensor) -> Tensor:
        rows, k = x.shape
        if k != self._k or x.dtype is not torch.bfloat16:
            raise ValueError(f"linear takes bfloat16 [rows, {self._k}], not {x.dtype} {tuple(x.shape)}")
        x = x.contiguous()
        out = self._out(rows, self._dtype)
        packed, bias = self._pointers
        threads = torch.get_num_threads()
        self._call(x.data_ptr(), packed, bias, out.data_ptr(), rows, self._n, k, self._wide, threads)
        return out


class RowLinear(NativeLinear):
    """Row-major weights: the native kernel for few rows, torch for many."""

    def __init__(self, library: Library, weight: Tensor, bias: Tensor | None, float32_out: bool) -> None:
        self._call, self._weight = library.linear_rows, weight
        self._bias = bias
        self._wide_bias = None if bias is None else bias.float().contiguous()
        self._bias_pointer = None if self._wide_bias is None else self._wide_bias.data_ptr()
        self._float32_out = float32_out
        self._is_bf16 = int(weight.dtype is torch.bfloat16)
        self._few = FEW_ROWS.get(weight.dtype, 0) if weight.shape[1] % DEPTH == 0 else 0
        n, k = weight.shape
        self.native, self.most_rows = (ROWS, weight.data_ptr(), None, self._bias_pointer, n, k), self._few
        self._reused = Reused(n, torch.float32) if float32_out else None

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows > self._few:
            y = functional.linear(x, self._weight, self._bias)
            return y.float() if self._float32_out else y
        n, k = self._weight.shape
        if x.shape[1] != k or x.dtype is not self._weight.dtype:
            raise ValueError(f"linear takes {self._weight.dtype} [rows, {k}], not {x.dtype} {tuple(x.shape)}")
        x = x.contiguous()
        out = self._out(rows, torch.float32 if self._float32_out else x.dtype)
        weight, bias = self._weight.data_ptr(), self._bias_pointer
        wide = int(self._float32_out)
        threads = torch.get_num_threads()
        self._call(self._is_bf16, x.data_ptr(), weight, bias, out.data_ptr(), rows, n, k, wide, threads)
        return out


class NativeInt8Linear(NativeLinear):
    """Int8 weights, as tiles (one dimension) or row-major (two)."""

    def __init__(
        self,
        library: Library,
        packed: Tensor,
        shape: tuple[int, int],
        channels: tuple[Tensor, Tensor | None],
        dtypes: tuple[torch.dtype, bool],
    ) -> None:
        self._tiles, self._rows = library.int8_tiles, library.int8_rows
        self._packed, (self._n, self._k) = packed, shape
        scale, bias = channels
        self._scale, self._bias = scale.contiguous(), None if bias is None else bias.float().contiguous()
        self._pointers = (
            packed.data_ptr(),
            self._scale.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
        )
        self._dtype, float32_out = dtypes
        self._wide = int(float32_out)
        self._out_dtype = torch.float32 if float32_out else self._dtype
        kind = INT8_TILES if packed.dim() == 1 else INT8_ROWS
        weight, scale_pointer, bias_pointer = self._pointers
        self.native, self.most_rows = (kind, weight, scale_pointer, bias_pointer, *shape), ANY_ROWS
        self._reused = Reused(shape[0], torch.float32) if float32_out else None

    def __call__(self, x: Tensor) -> Tensor:
        rows, k = x.shape
        if k != self._k or x.dtype is not self._dtype:
            raise ValueError(f"linear takes {self._dtype} [rows, {self._k}], not {x.dtype} {tuple(x.shape)}")
        x = x.contiguous()
        out = self._out(rows, self._out_dtype)
        sizes = (rows, self._n, k, self._wide, torch.get_num_threads())
        if self._packed.dim() == 1:
            self._tiles(x.data_ptr(), *self._pointers, out.data_ptr(), *sizes)
        else:
            is_bf16 = int(self._dtype is torch.bfloat16)
            self._rows(is_bf16, x.data_ptr(), *self._pointers, out.data_ptr(), *sizes)
        return out
