"""Decode attention: one query row per sequence, long contexts split over the device (Flash-Decoding, Dao et al., 2023).

Owns the choice of splits and two kernels: one attends within a split, one joins the splits of a row by their weights.
Invariant: the grid depends only on the number of sequences, the heads and `max_context` rounded up to a power of two,
so a captured CUDA graph serves every batch that fits; how a context is divided is decided on the device.

A context of c tokens is cut into shares of `share(c)` tokens, a multiple of the step; splits past its end do nothing:

    0         share      2 * share        c
    |--------|----------|----------------|         split 0, 1, 2; splits 3.. return at once
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd_kernels.protocols import DecodeBatch
from pd_kernels.triton.arguments import LOG2_E, Heads, check, multiprocessors, on, precision
from pd_kernels.triton.softmax import attend
from pd_kernels.triton.tiles import TileBook, Tiles

MIN_STEPS = 4  # a split shorter than this costs more to join than it saves
LONGEST_SHARE = 8192  # tokens: no program walks further, however many sequences there are
MOST_SPLITS = 128
WAVES = 2  # programs per multiprocessor to aim for
JOINED = tl.constexpr(16)  # splits joined at a time


@triton.jit
def share(context: tl.tensor, num_splits: tl.tensor, KEYS: tl.constexpr, LEAST: tl.constexpr) -> tl.tensor:
    """Tokens per split: enough for `num_splits` splits to cover the context, a multiple of KEYS, not below LEAST."""
    even = (context + num_splits - 1) // num_splits
    return tl.maximum((even + KEYS - 1) // KEYS * KEYS, LEAST)


@triton.jit(do_not_specialize=["num_splits"])
def _decode(  # noqa: PLR0913  # a kernel takes flat arguments
    q: tl.tensor,
    kv: tl.tensor,
    out: tl.tensor,
    part: tl.tensor,  # float32 [sequences, q_heads, splits, head_dim]: each split's own result
    weight: tl.tensor,  # float32 [sequences, q_heads, splits]: log2 of the sum of its exponentials
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
    LEAST: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    sequence = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(1)
    context = tl.load(context_lens + sequence)
    length = share(context, num_splits, KEYS, LEAST)
    start = split * length
    if start >= tl.maximum(context, 1):
        return
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
    whole = start + (limit - start) // KEYS * KEYS
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

    result = mixed / tl.where(total > 0, total, 1.0)[:, None]  # an empty context, a graph's padding, gives zeros
    out_row = sequence.to(tl.int64) * (KV_HEADS * GROUP) + row_head
    if length >= context:  # the only split: nothing to join
        out_at = out_row * HEAD_DIM
        tl.store(out + out_at[:, None] + column[None, :], result.to(out.dtype.element_ty), mask=wanted)
    else:
        part_row = out_row * num_splits + split
        tl.store(part + (part_row * HEAD_DIM)[:, None] + column[None, :], result, mask=wanted)
        tl.store(weight + part_row, top + tl.log2(total), mask=row < GROUP)


@triton.jit(do_not_specialize=["num_splits"])
def _join(  # noqa: PLR0913  # a kernel takes flat arguments
    part: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    context_lens: tl.tensor,
    num_splits: tl.tensor,
    Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    LEAST: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    context = tl.load(context_lens + row // Q_HEADS)
    length = share(context, num_splits, KEYS, LEAST)
    if length >= context:
        return
    used = (context + length - 1) // length
    column = tl.arange(0, DIM)
    first = row.to(tl.int64) * num_splits
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([DIM], tl.float32)
    for begin in range(0, used, JOINED):
        split = begin + tl.arange(0, JOINED)
        exists = split < used
        log_sum = tl.load(weight + first + split, mask=exists, other=float("-inf"))
        at = (first + split) * HEAD_DIM
        wanted = exists[:, None] & (column < HEAD_DIM)[None, :]
        results = tl.load(part + at[:, None] + column[None, :], mask=wanted, other=0.0)
        higher = tl.maximum(top, tl.max(log_sum, 0))
        shrink = tl.exp2(top - higher)
        factor = tl.exp2(log_sum - higher)
        total = total * shrink + tl.sum(factor, 0)
        mixed = mixed * shrink + tl.sum(results * factor[:, None], 0)
        top = higher
    result = (mixed / total).to(out.dtype.element_ty)
    tl.store(out + row.to(tl.int64) * HEAD_DIM + column, result, mask=column < HEAD_DIM)


def num_splits(programs: int, max_context: int, keys: int, num_multiprocessors: int) -> int:
    """Splits per context when one split each would make `programs` programs: fill the device, none too long or short.

    `max_context` counts as the next power of two, so the answer is the same for all batches that a graph serves.
    """
    reach = triton.next_power_of_2(max(max_context, 1))
    to_fill = triton.cdiv(WAVES * num_multiprocessors, programs)
    most = min(triton.cdiv(reach, MIN_STEPS * keys), MOST_SPLITS)
    return int(min(max(to_fill, triton.cdiv(reach, LONGEST_SHARE), 1), most))


class TritonDecode:
    """See `protocols.DecodeAttention`; float32, bfloat16 and float16, head sizes to 256, any block size.

    Nothing waits for the device and scratch comes from torch's allocator, so calls can be captured in a CUDA graph.
    A sequence whose context is 0 (a row that pads a graph) gets zeros.
    """

    def __init__(self, book: TileBook | None = None) -> None:
        self._book = book or TileBook()

    def __call__(self, q: Tensor, kv: Tensor, batch: DecodeBatch, scale: float, out: Tensor) -> None:
        heads = check(q, kv, batch.block_tables, (batch.context_lens,), scale, out)
        if q.shape[0] == 0:
            return
        tiles = self._book.tiles("decode", q.device, q.dtype, heads.head_dim)
        with on(q.device):
            _launch(q, kv, batch, scale, out, heads, tiles)


def _launch(q: Tensor, kv: Tensor, batch: DecodeBatch, scale: float, out: Tensor, heads: Heads, tiles: Tiles) -> None:
    num_sequences, num_heads, head_dim = q.shape
    programs = num_sequences * heads.kv_heads
    splits = num_splits(programs, batch.max_context, tiles.keys, multiprocessors(q.device))
    part = weight = out  # never touched when there is one split
    if splits > 1:
        rows = num_sequences * num_heads * splits
        scratch = torch.empty(rows * (head_dim + 1), dtype=torch.float32, device=q.device)
        part, weight = scratch[: rows * head_dim], scratch[rows * head_dim :]
    _decode[(programs, splits)](
        q,
        kv,
        out,
        part,
        weight,
        batch.context_lens,
        batch.block_tables,
        scale * LOG2_E,
        splits,
        q.stride(0),
        q.stride(1),
        *kv.stride()[:4],
        batch.block_tables.stride(0),
        KV_HEADS=heads.kv_heads,
        GROUP=heads.group,
        HEAD_DIM=head_dim,
        DIM=heads.padded_dim,
        BLOCK_SIZE=heads.block_size,
        ROWS=max(16, triton.next_power_of_2(heads.group)),
        KEYS=tiles.keys,
        LEAST=MIN_STEPS * tiles.keys,
        PRECISION=precision(q.dtype),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if splits > 1:
        _join[(num_sequences * num_heads,)](
            part,
            weight,
            out,
            batch.context_lens,
            splits,
            Q_HEADS=num_heads,
            HEAD_DIM=head_dim,
            DIM=heads.padded_dim,
            KEYS=tiles.keys,
            LEAST=MIN_STEPS * tiles.keys,
            num_warps=4,
        )
