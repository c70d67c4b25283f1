"""Splitting the keys of a query over several programs, and joining what they found (Flash-Decoding, Dao et al., 2023).

Owns the number of splits, where each begins, the scratch between the two launches and the kernel that joins.
Invariant: a split that met no key says so by the weight -inf, and its part of the scratch is never read.

`limit` keys are cut into shares of `share(limit)` keys, a multiple of the step; splits past the end have none:

    0         share      2 * share       limit
    |--------|----------|----------------|         split 0, 1, 2; splits 3.. are empty
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MIN_STEPS = tl.constexpr(4)  # a split shorter than this costs more to join than it saves
LONGEST_SHARE = 8192  # keys: no decode program walks further, however many sequences there are
MOST_SPLITS = 128
WAVES = 2  # programs per multiprocessor to aim for
JOINED = tl.constexpr(16)  # splits joined at a time


def num_splits(programs: int, max_context: int, keys: int, num_multiprocessors: int) -> int:
    """Splits per context when one split each would make `programs` programs: fill the device, none too long or short.

    `max_context` counts as the next power of two, so the answer is the same for all batches that a graph serves.
    """
    reach = triton.next_power_of_2(max(max_context, 1))
    to_fill = triton.cdiv(WAVES * num_multiprocessors, programs)
    most = min(triton.cdiv(reach, MIN_STEPS.value * keys), MOST_SPLITS)
    return int(min(max(to_fill, triton.cdiv(reach, LONGEST_SHARE), 1), most))


def scratch(out: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Float32 parts [tokens, q_heads, splits, head_dim] and weights [tokens, q_heads, splits] for `out`, flat."""
    if splits == 1:
        return out, out  # never touched
    rows, dim = out.shape[0] * out.shape[1] * splits, out.shape[2]
    both = torch.empty(rows * (dim + 1), dtype=torch.float32, device=out.device)
    return both[: rows * dim], both[rows * dim :]


def join(out: Tensor, part: Tensor, weight: Tensor, splits: int) -> None:
    """Fill `out` [tokens, q_heads, head_dim] from what the splits left in the scratch."""
    dim = out.shape[2]
    columns = max(16, triton.next_power_of_2(dim))
    _join[(out.shape[0] * out.shape[1],)](part, weight, out, splits, HEAD_DIM=dim, DIM=columns, num_warps=4)


@triton.jit
def share(limit: tl.tensor, num_splits: tl.tensor, KEYS: tl.constexpr) -> tl.tensor:
    """Keys per split: enough for `num_splits` splits to cover `limit`, a multiple of KEYS."""
    even = (limit + num_splits - 1) // num_splits
    return tl.maximum((even + KEYS - 1) // KEYS, MIN_STEPS) * KEYS


@triton.jit
def store(  # noqa: PLR0913  # a kernel takes flat arguments
    out: tl.tensor,
    part: tl.tensor,
    weight: tl.tensor,
    row: tl.tensor,  # int64 [ROWS]: rows of `out` as [tokens * q_heads, HEAD_DIM]
    exists: tl.tensor,  # bool [ROWS]
    top: tl.tensor,  # this and the next two as `attend` leaves them
    total: tl.tensor,
    mixed: tl.tensor,
    num_splits: tl.tensor,
    split: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """Write finished rows to `out`, or those of one split to the scratch."""
    column = tl.arange(0, DIM)
    met = total > 0
    total = tl.where(met, total, 1.0)  # without a key, as in a row that pads a graph, the result is zero
    result = mixed / total[:, None]
    if SPLIT:
        at = row * num_splits + split
        wanted = (exists & met)[:, None] & (column < HEAD_DIM)[None, :]
        tl.store(part + (at * HEAD_DIM)[:, None] + column[None, :], result, mask=wanted)
        tl.store(weight + at, top + tl.log2(total), mask=exists)
    else:
        wanted = exists[:, None] & (column < HEAD_DIM)[None, :]
        tl.store(out + (row * HEAD_DIM)[:, None] + column[None, :], result.to(out.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=["num_splits"])
def _join(
    part: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    num_splits: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, DIM)
    top = float("-inf")
    total = 0.0
    mixed = tl.zeros([DIM], tl.float32)
    for begin in range(0, num_splits, JOINED):
        split = begin + tl.arange(0, JOINED)
        at = row * num_splits + split
        log_sum = tl.load(weight + at, mask=split < num_splits, other=float("-inf"))
        met = log_sum > float("-inf")
        wanted = met[:, None] & (column < HEAD_DIM)[None, :]
        found = tl.load(part + (at * HEAD_DIM)[:, None] + column[None, :], mask=wanted, other=0.0)
        higher = tl.maximum(top, tl.max(log_sum, 0))
        base = tl.where(higher > float("-inf"), higher, 0.0)
        factor = tl.exp2(log_sum - base)
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(factor, 0)
        mixed = mixed * shrink + tl.sum(found * factor[:, None], 0)
        top = higher
    result = mixed / tl.where(total > 0, total, 1.0)
    tl.store(out + row * HEAD_DIM + column, result.to(out.dtype.element_ty), mask=column < HEAD_DIM)
