"""Decode attention: one query row per sequence, with the query heads of a KV head as one tile.

Owns the kernel; the step over keys is in `softmax`, the division of a context in `splits`.
Invariant: the grid depends only on the number of sequences, the heads and `max_context` rounded up to a power of two,
so a captured CUDA graph serves every batch that fits; how a context is divided is decided on the device.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pd_kernels.protocols import DecodeBatch
from pd_kernels.triton.arguments import LOG2_E, check, multiprocessors, on, precision
from pd_kernels.triton.softmax import attend
from pd_kernels.triton.splits import join, num_splits, scratch, share, store
from pd_kernels.triton.tiles import TileBook


@triton.jit(do_not_specialize=["num_splits"])
def _decode(  # noqa: PLR0913  # a kernel takes flat arguments
    q: tl.tensor,
    kv: tl.tensor,
    out: tl.tensor,
    part: tl.tensor,  # scratch of the splits
    weight: tl.tensor,
    context_lens: tl.tensor,
    tables: tl.tensor,
    scale_log2: tl.tensor,
    num_splits: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    block_stride: tl.tensor,
    value_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    table_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    sequence = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(1)
    context = tl.load(context_lens + sequence)
    start = 0
    limit = context
    if SPLIT:
        length = share(context, num_splits, KEYS)
        start = split * length
        limit = tl.minimum(start + length, context)

    row = tl.arange(0, ROWS)
    column = tl.arange(0, DIM)
    wanted = (row < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    row_head = head * GROUP + row
    q_at = sequence.to(tl.int64) * q_token_stride + row_head * q_head_stride
    queries = tl.load(q + q_at[:, None] + column[None, :], mask=wanted, other=0.0)
    position = tl.zeros([ROWS], tl.int32) + (context - 1)

    keys = kv + head * head_stride
    values = keys + value_stride
    table = tables + sequence.to(tl.int64) * table_stride
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM], tl.float32)
    whole = start + tl.maximum(limit - start, 0) // KEYS * KEYS
    for begin in range(start, whole, KEYS):
        top, total, mixed = attend(
            queries, top, total, mixed, keys, values, table, begin, limit, position, scale_log2,
            block_stride, token_stride, HEAD_DIM, DIM, BLOCK_SIZE, KEYS, False, PRECISION,
        )  # fmt: skip
    if whole < limit:
        top, total, mixed = attend(
            queries, top, total, mixed, keys, values, table, whole, limit, position, scale_log2,
            block_stride, token_stride, HEAD_DIM, DIM, BLOCK_SIZE, KEYS, True, PRECISION,
        )  # fmt: skip

    out_row = sequence.to(tl.int64) * (KV_HEADS * GROUP) + row_head
    store(out, part, weight, out_row, row < GROUP, top, total, mixed, num_splits, split, HEAD_DIM, DIM, SPLIT)


class TritonDecode:
    """See `protocols.DecodeAttention`; float32, bfloat16 and float16, head sizes to 256, any block size.

    Nothing waits for the device and scratch comes from torch's allocator, so calls can be captured in a CUDA graph.
    A sequence whose context is 0 (a row that pads a graph) gets zeros.
    """

    def __init__(self, book: TileBook | None = None) -> None:
        self._book = book or TileBook()

    def __call__(self, q: Tensor, kv: Tensor, batch: DecodeBatch, scale: float, out: Tensor) -> None:
        tables = batch.block_tables
        heads = check(q, kv, tables, (batch.context_lens,), scale, out)
        if q.shape[0] == 0:
            return
        tiles = self._book.tiles("decode", q.device, q.dtype, heads.head_dim)
        programs = q.shape[0] * heads.kv_heads
        splits = num_splits(programs, batch.max_context, tiles.keys, multiprocessors(q.device))
        with on(q.device):
            part, weight = scratch(out, splits)
            _decode[(programs, splits)](
                q,
                kv,
                out,
                part,
                weight,
                batch.context_lens,
                tables,
                scale * LOG2_E,
                splits,
                q.stride(0),
                q.stride(1),
                *kv.stride()[:4],
                tables.stride(0),
                KV_HEADS=heads.kv_heads,
                GROUP=heads.group,
                HEAD_DIM=heads.head_dim,
                DIM=heads.padded_dim,
                BLOCK_SIZE=heads.block_size,
                ROWS=max(16, triton.next_power_of_2(heads.group)),
                KEYS=tiles.keys,
                PRECISION=precision(q.dtype),
                SPLIT=splits > 1,
                num_warps=tiles.warps,
                num_stages=tiles.stages,
            )
            if splits > 1:
                join(out, part, weight, splits)
