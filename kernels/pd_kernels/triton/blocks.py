"""Whole KV blocks, or the same byte range of each, between a pool and one contiguous staging buffer.

Owns the two copies; owns neither buffer nor who may touch them when. Invariant: bytes are moved, never interpreted, and
a block id outside of the pool (padding, such as -1) moves nothing.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913 (a kernel takes every pointer and stride)

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048  # words per program
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


@triton.jit
def _copy_kernel(
    pool,
    staging,
    ids,
    num_blocks,
    pool_stride,
    staging_stride,
    offset,
    size,
    GATHERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    block = tl.load(ids + index)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (word < size) & (block >= 0) & (block < num_blocks)
    here, there = pool + block * pool_stride + offset + word, staging + index * staging_stride + word
    if GATHERS:
        tl.store(there, tl.load(here, mask=inside), mask=inside)
    else:
        tl.store(here, tl.load(there, mask=inside), mask=inside)


def gather(pool: Tensor, ids: Tensor, staging: Tensor, *, offset: int = 0, size: int | None = None) -> None:
    """staging[i] = bytes [offset, offset + size) of block ids[i]; without `size`, to the end of the block.

    `pool` is [num_blocks, ...] of any dtype, each block contiguous; `ids` int64 [n]; `staging` uint8 [n, size], its
    rows contiguous. A row whose id is outside of the pool keeps what it held. Raises ValueError on other shapes.
    """
    _copy(pool, ids, staging, (offset, size), "gather")


def scatter(pool: Tensor, ids: Tensor, staging: Tensor, *, offset: int = 0, size: int | None = None) -> None:
    """Bytes [offset, offset + size) of block ids[i] = staging[i]; the rest as for `gather`.

    An id that comes twice is a race: one of its rows wins, word by word.
    """
    _copy(pool, ids, staging, (offset, size), "scatter")


def _copy(
    pool: Tensor, ids: Tensor, staging: Tensor, part: tuple[int, int | None], direction: Literal["gather", "scatter"]
) -> None:
    shapes = f"{direction} of {tuple(ids.shape)} blocks between {tuple(pool.shape)} and {tuple(staging.shape)}"
    blocks = _bytes_of(pool, shapes)
    offset, size = part[0], blocks.shape[1] - part[0] if part[1] is None else part[1]
    if offset < 0 or size < 0 or offset + size > blocks.shape[1]:
        raise ValueError(f"{shapes}: bytes [{offset}, {offset + size}) are not in a block of {blocks.shape[1]}")
    if ids.dim() != 1 or ids.dtype is not torch.int64:
        raise ValueError(f"{shapes}: ids must be int64 [n], not {ids.dtype}")
    if staging.dtype is not torch.uint8 or staging.shape != (ids.shape[0], size):
        raise ValueError(f"{shapes}: staging must be uint8 [{ids.shape[0]}, {size}], not {staging.dtype}")
    if not staging.numel():
        return
    if staging.stride(1) != 1:
        raise ValueError(f"{shapes}: rows of staging must be contiguous, not of strides {staging.stride()}")
    word, dtype = _widest(blocks, staging, offset)
    words = triton.cdiv(size, word)
    _copy_kernel[(ids.shape[0], triton.cdiv(words, _BLOCK))](
        _words_of(blocks, dtype),
        _words_of(staging, dtype),
        ids.contiguous(),
        blocks.shape[0],
        blocks.stride(0) // word,
        staging.stride(0) // word,
        offset // word,
        words,
        GATHERS=direction == "gather",
        BLOCK=min(triton.next_power_of_2(words), _BLOCK),
        num_warps=8,
    )


def _bytes_of(pool: Tensor, shapes: str) -> Tensor:
    """A uint8 view [num_blocks, block_bytes] of `pool`."""
    if pool.dim() < 2 or not pool.numel() or not pool[0].is_contiguous():
        raise ValueError(f"{shapes}: a pool has blocks, each contiguous, not of strides {pool.stride()}")
    return pool.view(pool.shape[0], -1).view(torch.uint8)


def _widest(blocks: Tensor, staging: Tensor, offset: int) -> tuple[int, torch.dtype]:
    """Bytes and dtype of the largest word that every row starts on and is filled by."""
    starts = [offset, staging.shape[1]]
    for rows in (blocks, staging):
        starts += rows.data_ptr(), int(rows.storage_offset()), rows.stride(0)
    return next((word, dtype) for word, dtype in _WORDS if not any(start % word for start in starts))


def _words_of(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The memory of `rows` from its first byte on, as words: only its address and dtype are used."""
    return rows[0, : dtype.itemsize].view(dtype)
