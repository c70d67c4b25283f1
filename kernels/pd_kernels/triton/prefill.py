"""Prefill attention: chunks of many prompts in one launch, over a paged prefix, with grouped heads packed.

Owns the work list and the kernel; the step over keys is in `softmax`.
Invariant: every query row belongs to exactly one item of the work list, so each row of `out` is written once.

A tile holds the query heads of one KV head for `rows // group` consecutive tokens of one request:

    row      0          1        ..  group - 1   group      ..
    token    first      first        first       first + 1
    head     0          1            group - 1   0              of the KV head's group

so keys and values are read once for the group, and short prompts still fill a product of 16 rows or more.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd_kernels.protocols import PrefillBatch
from pd_kernels.triton.arguments import LOG2_E, Heads, check, multiprocessors, on, precision
from pd_kernels.triton.softmax import attend
from pd_kernels.triton.splits import join, num_splits, scratch, share, store
from pd_kernels.triton.tiles import TileBook, Tiles


@triton.jit(do_not_specialize=["num_splits"])
def _prefill(  # noqa: PLR0913  # a kernel takes flat arguments
    q: tl.tensor,
    kv: tl.tensor,
    out: tl.tensor,
    part: tl.tensor,  # scratch of the splits
    weight: tl.tensor,
    work: tl.tensor,  # int32 [items, 2]: request, its first token in this tile; request -1 for no work
    query_start: tl.tensor,
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
    TOKENS: tl.constexpr = ROWS // GROUP
    item = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(1)
    request = tl.load(work + 2 * item)
    if request < 0:
        return
    first = tl.load(work + 2 * item + 1)
    start = tl.load(query_start + request)
    length = tl.load(query_start + request + 1) - start
    context = tl.load(context_lens + request)
    prefix = context - length

    row = tl.arange(0, ROWS)
    column = tl.arange(0, DIM)
    token = first + row // GROUP
    row_head = head * GROUP + row % GROUP
    exists = (row < TOKENS * GROUP) & (token < length)
    q_row = (start + token).to(tl.int64)
    q_at = q_row * q_token_stride + row_head * q_head_stride
    wanted = exists[:, None] & (column < HEAD_DIM)[None, :]
    queries = tl.load(q + q_at[:, None] + column[None, :], mask=wanted, other=0.0)
    position = prefix + token

    keys = kv + head * head_stride
    values = keys + value_stride
    table = tables + request.to(tl.int64) * table_stride
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM], tl.float32)
    origin = 0
    limit = tl.minimum(context, prefix + first + TOKENS)
    if SPLIT:
        span = share(limit, num_splits, KEYS)
        origin = split * span
        limit = tl.minimum(origin + span, limit)
    whole = (prefix + first + 1) // KEYS * KEYS  # every row of the tile sees the keys before it: no mask
    whole = tl.maximum(tl.minimum(whole, limit), origin)
    for begin in range(origin, whole, KEYS):
        top, total, mixed = attend(
            queries, top, total, mixed, keys, values, table, begin, limit, position, scale_log2,
            block_stride, token_stride, HEAD_DIM, DIM, BLOCK_SIZE, KEYS, False, PRECISION,
        )  # fmt: skip
    for begin in range(whole, limit, KEYS):
        top, total, mixed = attend(
            queries, top, total, mixed, keys, values, table, begin, limit, position, scale_log2,
            block_stride, token_stride, HEAD_DIM, DIM, BLOCK_SIZE, KEYS, True, PRECISION,
        )  # fmt: skip

    out_row = q_row * (KV_HEADS * GROUP) + row_head
    store(out, part, weight, out_row, exists, top, total, mixed, num_splits, split, HEAD_DIM, DIM, SPLIT)


def work_list(batch: PrefillBatch, num_tokens: int, tokens: int) -> Tensor:
    """Tiles of `tokens` query tokens, int32 [items, 2]: request and first token, those with most keys first.

    Made on the batch's device without waiting for it: the number of items is the most that `num_tokens` tokens in
    that many requests can need, and items that are not needed come last, as request -1.
    """
    starts, device = batch.query_start, batch.query_start.device
    num_requests = batch.context_lens.shape[0]
    lengths = starts[1:] - starts[:-1]
    ends = ((lengths + (tokens - 1)) // tokens).cumsum(0, dtype=torch.int32)  # items of requests up to this one
    items = torch.arange(num_tokens // tokens + num_requests, dtype=torch.int32, device=device)
    request = torch.searchsorted(ends, items, right=True, out_int32=True)
    exists = request < num_requests
    at = request.clamp(max=num_requests - 1).long()
    before = ends[at] - (lengths[at] + (tokens - 1)) // tokens
    first = (items - before) * tokens
    cost = batch.context_lens[at] - lengths[at] + first + tokens  # keys that the tile meets, nearly
    order = cost.where(exists, 0).argsort(descending=True)
    return torch.stack([request.where(exists, -1), first], dim=1)[order].to(torch.int32).contiguous()


def fit(
    tiles: Tiles, heads: Heads, num_tokens: int, batch: PrefillBatch, num_multiprocessors: int
) -> tuple[Tiles, int]:
    """Rows per tile and splits of the keys: fewer rows where chunks are short; where tiles are too few for the device,
    fewer rows down to 64, then splits if the context is long enough to divide, else fewer rows still.
    """

    def programs(rows: int) -> int:
        tokens = rows // heads.group
        return heads.kv_heads * max((num_tokens + tokens - 1) // tokens, batch.context_lens.shape[0])

    def splits(rows: int) -> int:
        if programs(rows) >= num_multiprocessors:
            return 1
        return num_splits(programs(rows), batch.max_context, tiles.keys, num_multiprocessors)

    rows = max(tiles.rows, triton.next_power_of_2(heads.group))
    for fewer in (64, 16):
        if heads.group <= fewer < rows:
            idle = programs(rows) * (splits(rows) if fewer < 64 else 1) < num_multiprocessors
            if idle or batch.max_query * heads.group <= fewer:
                rows = fewer
    return replace(tiles, rows=rows, warps=4 if rows < tiles.rows else tiles.warps), splits(rows)


class TritonPrefill:
    """See `protocols.PrefillAttention`; float32, bfloat16 and float16, head sizes to 256, any block size.

    A batch is a value: its tensors are not changed in place while it is in use, because the work list is made once
    for all layers that are given the same batch.
    """

    def __init__(self, book: TileBook | None = None) -> None:
        self._book = book or TileBook()
        self._last: tuple[PrefillBatch, int, Tensor] | None = None

    def __call__(self, q: Tensor, kv: Tensor, batch: PrefillBatch, scale: float, out: Tensor) -> None:
        tables = batch.block_tables
        heads = check(q, kv, tables, (batch.query_start, batch.context_lens), scale, out)
        if q.shape[0] == 0 or batch.max_query == 0:
            return
        tiles = self._book.tiles("prefill", q.device, q.dtype, heads.head_dim)
        tiles, splits = fit(tiles, heads, q.shape[0], batch, multiprocessors(q.device))
        with on(q.device):
            work = self._work(batch, q.shape[0], tiles.rows // heads.group)
            part, weight = scratch(out, splits)
            _prefill[(work.shape[0] * heads.kv_heads, splits)](
                q,
                kv,
                out,
                part,
                weight,
                work,
                batch.query_start,
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
                ROWS=tiles.rows,
                KEYS=tiles.keys,
                PRECISION=precision(q.dtype),
                SPLIT=splits > 1,
                num_warps=tiles.warps,
                num_stages=tiles.stages,
            )
            if splits > 1:
                join(out, part, weight, splits)

    def _work(self, batch: PrefillBatch, num_tokens: int, tokens: int) -> Tensor:
        if batch.query_start.is_cuda and torch.cuda.is_current_stream_capturing():
            return work_list(batch, num_tokens, tokens)  # part of the graph: made anew at every replay
        if self._last is None or self._last[0] is not batch or self._last[1] != tokens:
            self._last = (batch, tokens, work_list(batch, num_tokens, tokens))
        return self._last[2]
