"""The step that prefill and decode share: one tile of queries meets the next keys of a paged cache.

Owns the addressing of the paged cache and the online softmax (Milakov and Gimelshein, 2018; FlashAttention, Dao et al.,
2022), in float32 and in powers of two.
Invariant: a cache row or table entry at or past `limit` is never loaded, so nothing it holds can reach a result.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend(  # noqa: PLR0913  # a kernel takes flat arguments
    queries: tl.tensor,  # [ROWS, DIM]
    top: tl.tensor,  # float32 [ROWS]: the largest score so far, times log2(e)
    total: tl.tensor,  # float32 [ROWS]: sum of 2 ** (score - top)
    mixed: tl.tensor,  # float32 [ROWS, DIM]: sum of 2 ** (score - top) * value
    keys: tl.tensor,  # where block 0 of this head's keys begins
    values: tl.tensor,
    table: tl.tensor,  # this request's row of the block table
    begin: tl.tensor,  # the first key of this step, a multiple of KEYS
    limit: tl.tensor,  # keys at or past it do not exist
    position: tl.tensor,  # int32 [ROWS]: the last key that each row sees
    scale_log2: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,  # False where every row sees all KEYS keys
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    lane = tl.arange(0, KEYS)
    key = begin + lane
    exists = key < limit
    # Ids are widened before they meet a stride: a pool of many layers has more than 2 ** 31 elements.
    if BLOCK_SIZE % KEYS == 0:  # the step lies in one block: one id, and consecutive rows
        block = tl.load(table + begin // BLOCK_SIZE).to(tl.int64)
        row = block * block_stride + (begin % BLOCK_SIZE + lane) * token_stride
    elif MASKED:
        block = tl.load(table + key // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        row = block * block_stride + (key % BLOCK_SIZE) * token_stride
    else:
        block = tl.load(table + key // BLOCK_SIZE).to(tl.int64)
        row = block * block_stride + (key % BLOCK_SIZE) * token_stride
    column = tl.arange(0, DIM)
    at = row[:, None] + column[None, :]
    if MASKED:
        wanted = exists[:, None] & (column < HEAD_DIM)[None, :]
        k = tl.load(keys + at, mask=wanted, other=0.0)
        v = tl.load(values + at, mask=wanted, other=0.0)
    elif HEAD_DIM < DIM:
        wanted = tl.broadcast_to((column < HEAD_DIM)[None, :], (KEYS, DIM))
        k = tl.load(keys + at, mask=wanted, other=0.0)
        v = tl.load(values + at, mask=wanted, other=0.0)
    else:
        k = tl.load(keys + at)
        v = tl.load(values + at)
    score = tl.dot(queries, tl.trans(k), input_precision=PRECISION)
    if MASKED:
        score = tl.where(exists[None, :] & (key[None, :] <= position[:, None]), score, float("-inf"))
    # The scale is positive, so the largest product gives the largest score and scaling fuses with the subtraction.
    higher = tl.maximum(top, tl.max(score, 1) * scale_log2)
    base = higher
    if MASKED:  # a row may have met no key yet
        base = tl.where(higher > float("-inf"), higher, 0.0)
    weight = tl.exp2(score * scale_log2 - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weight, 1)
    mixed = tl.dot(weight.to(v.dtype), v, mixed * shrink[:, None], input_precision=PRECISION)
    return higher, total, mixed
