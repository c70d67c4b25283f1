"""Native attention over the paged cache: checks, strides and the C calls.

Owns no arithmetic. Invariant: what reaches C++ is contiguous where C++ assumes it; anything else is an error here.
"""

from __future__ import annotations

from ctypes import addressof

import torch
from torch import Tensor

from pd_kernels.cpu.library import AttentionShape, Library
from pd_kernels.protocols import DecodeBatch, PrefillBatch


def shape_of(q: Tensor, kv: Tensor, tables: Tensor, scale: float) -> AttentionShape:
    """Of queries [rows, q_heads, head_dim] over one layer's cache. Raises ValueError naming shapes that do not fit."""
    q_heads, dim = q.shape[1], q.shape[2]
    kv_heads, block_size = kv.shape[2], kv.shape[3]
    block_stride, kv_stride, head_stride, token_stride, element_stride = kv.stride()
    if kv.dtype != q.dtype or kv.shape[4] != dim or q_heads % kv_heads or element_stride != 1:
        raise ValueError(
            f"attention of q {tuple(q.shape)} {q.dtype} over kv {tuple(kv.shape)} {kv.dtype} {kv.stride()}"
        )
    return AttentionShape(
        tables.shape[0],
        q_heads,
        kv_heads,
        dim,
        block_size,
        tables.stride(0),
        block_stride,
        kv_stride,
        head_stride,
        token_stride,
        scale,
    )


def _check(q: Tensor, out: Tensor, tables: Tensor, *lengths: Tensor) -> None:
    if not out.is_contiguous() or out.shape != q.shape or out.dtype != q.dtype:
        raise ValueError(f"out must be contiguous {tuple(q.shape)} {q.dtype}, not {tuple(out.shape)} {out.dtype}")
    check_lengths(tables, *lengths)


def check_lengths(tables: Tensor, *lengths: Tensor) -> None:
    """Raises ValueError for what C++ would misread."""
    if tables.dtype != torch.int32 or (tables.shape[1] > 1 and tables.stride(1) != 1):
        raise ValueError("block_tables must be int32 with contiguous rows")
    if any(x.dtype != torch.int32 or not x.is_contiguous() for x in lengths):
        raise ValueError("context_lens and query_start must be contiguous int32")


class CpuPrefill:
    def __init__(self, library: Library) -> None:
        self._call = library.prefill_attention
        self._has_amx = int(library.has_amx)

    def __call__(self, q: Tensor, kv: Tensor, batch: PrefillBatch, scale: float, out: Tensor) -> None:
        q, tables = q.contiguous(), batch.block_tables
        _check(q, out, tables, batch.context_lens, batch.query_start)
        shape = shape_of(q, kv, tables, scale)
        self._call(
            q.dtype is torch.bfloat16,
            self._has_amx,
            q.data_ptr(),
            kv.data_ptr(),
            batch.query_start.data_ptr(),
            batch.context_lens.data_ptr(),
            tables.data_ptr(),
            out.data_ptr(),
            addressof(shape),
            torch.get_num_threads(),
        )


class CpuDecode:
    def __init__(self, library: Library) -> None:
        self._call = library.decode_attention
        self._has_amx = int(library.has_amx)

    def __call__(self, q: Tensor, kv: Tensor, batch: DecodeBatch, scale: float, out: Tensor) -> None:
        q, tables = q.contiguous(), batch.block_tables
        _check(q, out, tables, batch.context_lens)
        shape = shape_of(q, kv, tables, scale)
        self._call(
            q.dtype is torch.bfloat16,
            self._has_amx,
            q.data_ptr(),
            kv.data_ptr(),
            batch.context_lens.data_ptr(),
            tables.data_ptr(),
            out.data_ptr(),
            addressof(shape),
            torch.get_num_threads(),
        )
