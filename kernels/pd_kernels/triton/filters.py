"""Who may be drawn and at what logit: edits from a request's history, and truncation as one threshold per row.

Owns the batched kernels; the meaning (order of the edits, who survives a tie) is the sampler's, repeated here exactly.
Invariant: no sort, no wait for the device, and no row looks at another.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913 (a kernel takes every pointer and stride)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd_kernels.triton.order import key_of, value_of

_BLOCK = 4096
_EDIT_BLOCK = 1024
_LEAST = tl.constexpr(-(2**31))
_MOST = tl.constexpr(2**31 - 1)
_KEY_OF_MINUS_INFINITY = tl.constexpr(-2139095041)
_SMALLEST_MASS = tl.constexpr(1e-300)  # a nucleus of nothing is still the likeliest token


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitEdits:
    """What to change in rows of logits: row r owns the entries [starts[r], starts[r + 1]), one per distinct token."""

    starts: Tensor  # int64 [rows + 1]
    ids: Tensor  # int64 [entries]; those outside of the vocabulary are skipped
    counts: Tensor  # int32 [entries]: times generated; 0: in the prompt only; -1: in neither, only biased
    biases: Tensor  # float32 [entries]; -inf bans
    repetition: Tensor  # float32 [rows]; 1 changes nothing
    presence: Tensor  # float64 [rows]; 0 changes nothing
    frequency: Tensor  # float64 [rows]


@triton.jit
def _edit_kernel(
    logits, starts, ids, counts, biases, repetition, presence, frequency, stride, vocab, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(starts + row), tl.load(starts + row + 1)
    penalty = tl.load(repetition + row)
    once, each = tl.load(presence + row), tl.load(frequency + row)
    while begin < end:
        entry = begin + tl.arange(0, BLOCK)
        inside = entry < end
        id = tl.load(ids + entry, mask=inside, other=-1)
        inside = inside & (id >= 0) & (id < vocab)
        count = tl.load(counts + entry, mask=inside, other=-1)
        place = logits + row * stride + id
        x = tl.load(place, mask=inside, other=0.0)
        repeated = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + penalty), x * penalty)
        x = tl.where(count >= 0, repeated, x)
        cost = (once + each * count.to(tl.float64)).to(tl.float32)
        x = tl.where(count > 0, x - cost, x) + tl.load(biases + entry, mask=inside, other=0.0)
        tl.store(place, x, mask=inside)
        begin += BLOCK


def apply_penalties(logits: Tensor, edits: LogitEdits) -> None:
    """Repetition penalty, presence and frequency penalty, then bias, on float32 `logits` [rows, vocab], in place.

    An id twice in one row is a race: the caller merges its entries.
    """
    rows = _check(logits)
    if edits.starts.shape != (rows + 1,) or edits.ids.dtype is not torch.int64:
        raise ValueError(f"edits of {tuple(logits.shape)}: starts {tuple(edits.starts.shape)}, ids {edits.ids.dtype}")
    types = (edits.counts.dtype, edits.biases.dtype, edits.repetition.dtype, edits.presence.dtype)
    if types != (torch.int32, torch.float32, torch.float32, torch.float64):
        raise ValueError(f"edits of {tuple(logits.shape)}: counts, biases, repetition, presence are of {types}")
    if rows and edits.ids.numel():
        _edit_kernel[(rows,)](
            logits,
            edits.starts,
            edits.ids,
            edits.counts,
            edits.biases,
            edits.repetition,
            edits.presence,
            edits.frequency,
            logits.stride(0),
            logits.shape[1],
            BLOCK=_EDIT_BLOCK,
            enable_fp_fusion=False,  # each operation rounded by itself, as in the sampler
        )


@triton.jit
def _mass_from(scaled, weights, key, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the weights, float64, where the value's key is `key` or more."""
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, VOCAB, BLOCK):
        id = start + tl.arange(0, BLOCK)
        x = tl.load(scaled + id, mask=id < VOCAB, other=0.0)
        w = tl.load(weights + id, mask=id < VOCAB, other=0.0)
        total += tl.where(key_of(x) >= key, w, 0.0).to(tl.float64)
    return tl.sum(total, 0)


@triton.jit
def _least_sufficient(scaled, weights, low, target, VOCAB: tl.constexpr, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key at or above `low` in the row such that all from it up count, or weigh, `target` or more.

    Bisection over int32 keys, where each end snaps to a key of the row, so it stops as soon as no value lies between.
    Always: what lies from `low` up suffices, what lies from `high` up does not.
    """
    high = tl.full((), _MOST, tl.int64) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        total = tl.zeros([BLOCK], tl.float64 if MASS else tl.int32)
        above = tl.full([BLOCK], _MOST, tl.int32)
        below = tl.full([BLOCK], _LEAST, tl.int32)
        for start in range(0, VOCAB, BLOCK):
            id = start + tl.arange(0, BLOCK)
            inside = id < VOCAB
            key = key_of(tl.load(scaled + id, mask=inside, other=0.0))
            up = inside & (key >= middle)
            if MASS:
                total += tl.where(up, tl.load(weights + id, mask=inside, other=0.0), 0.0).to(tl.float64)
            else:
                total += up.to(tl.int32)
            above = tl.minimum(above, tl.where(up, key, _MOST))
            below = tl.maximum(below, tl.where(inside & (key < middle), key, _LEAST))
        if tl.sum(total, 0) >= target:
            low = tl.min(above, 0).to(tl.int64)
        else:
            high = tl.max(below, 0).to(tl.int64) + 1
    return low


@triton.jit
def _threshold_kernel(
    scaled,
    weights,
    top_k,
    top_p,
    least,
    out,
    stride,
    VOCAB: tl.constexpr,
    HAS_K: tl.constexpr,
    HAS_P: tl.constexpr,
    HAS_LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scaled += row * stride
    weights += row * VOCAB
    limit = tl.full((), _KEY_OF_MINUS_INFINITY, tl.int64)
    if HAS_K:
        k = tl.load(top_k + row)
        if (k > 0) & (k < VOCAB):
            limit = _least_sufficient(scaled, weights, limit, k, VOCAB, False, BLOCK)
    if HAS_P:
        p = tl.load(top_p + row)
        if p < 1.0:
            target = tl.maximum(p * _mass_from(scaled, weights, limit, VOCAB, BLOCK), _SMALLEST_MASS)
            limit = _least_sufficient(scaled, weights, limit, target, VOCAB, True, BLOCK)
    value = value_of(limit.to(tl.int32))
    if HAS_LEAST:
        value = tl.maximum(value, tl.load(least + row))
    tl.store(out + row, value)


def thresholds(
    scaled: Tensor, *, top_k: Tensor | None = None, top_p: Tensor | None = None, min_p: Tensor | None = None
) -> Tensor:
    """The least value of each row that may be drawn, float32 [rows]; whoever equals it survives; -inf cuts nothing.

    `scaled` is float32 [rows, vocab] with 0 as each row's largest. `top_k` int64 [rows] keeps the k-th largest value
    and all above; 0, or the vocabulary or more, keeps all. `top_p` float64 [rows] then keeps the fewest of the largest
    whose probabilities reach p, and their equals (Holtzman et al., 2020); 1 keeps all. `min_p` float64 [rows] keeps
    what is p times as likely as the likeliest (Nguyen et al., 2024); 0 keeps all. None is for nobody asks. Masses are
    summed in float64, whatever the order; a cumulated mass within 1e-15 of p may fall to either side.
    """
    rows = _check(scaled)
    vocab = scaled.shape[1]
    for given, dtype in ((top_k, torch.int64), (top_p, torch.float64), (min_p, torch.float64)):
        if given is not None and (given.shape != (rows,) or given.dtype is not dtype):
            raise ValueError(f"limits of {tuple(scaled.shape)} are {dtype} [{rows}], not {given.dtype} {given.shape}")
    out = torch.empty(rows, dtype=torch.float32, device=scaled.device)
    if not rows:
        return out
    # torch's exp, once: the same bits as the sampler's on this device, which the kernel's own exp would not have
    weights = scaled.exp().contiguous() if top_p is not None else scaled
    least = min_p.log().clamp(max=0.0).float() if min_p is not None else scaled
    _threshold_kernel[(rows,)](
        scaled,
        weights,
        top_k if top_k is not None else scaled,
        top_p if top_p is not None else scaled,
        least,
        out,
        scaled.stride(0),
        VOCAB=vocab,
        HAS_K=top_k is not None,
        HAS_P=top_p is not None,
        HAS_LEAST=min_p is not None,
        BLOCK=min(triton.next_power_of_2(vocab), _BLOCK),
        num_warps=8,
    )
    return out


def _check(values: Tensor) -> int:
    """The rows of float32 [rows, vocab] with unit stride along a row."""
    is_row_major = values.dim() == 2 and values.stride(1) == 1 and 0 < values.shape[1] < 2**31
    if not is_row_major or values.dtype is not torch.float32:
        raise ValueError(f"logits must be float32 [rows, vocab], not {values.dtype} {tuple(values.shape)}")
    return values.shape[0]
