"""Drawing tokens for all rows of a step at once, in Triton, with no sort and no wait for the device.

Owns the noise on a GPU and the batched counterparts of what a sampler does per row: edits of logits, thresholds of
truncation (both in `filters`), draws, the likeliest tokens. Owns no rule: who survives and who wins is the sampler's.
Invariant: a row's result depends on nothing but its own values and parameters, and ties fall to the lowest id.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913 (a kernel takes every pointer and stride)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd_kernels.triton.filters import LogitEdits, apply_penalties, thresholds
from pd_kernels.triton.order import EMPTY, packed

__all__ = [
    "LogitEdits",
    "TritonSampling",
    "apply_penalties",
    "draw",
    "greedy",
    "likeliest",
    "logprobs",
    "scale",
    "thresholds",
]

MAX_TOP = 64  # of `likeliest`
_BLOCK = 4096  # values per program
_COLDEST = 1e-6  # lower temperatures draw as this one, so that no division overflows
# The noise is defined operation by operation. With this launch option neither LLVM nor ptxas joins a product and a sum
# into one fma (ptxas gets --fmad=false); `tl.div_rn` is the division rounded as IEEE says, `/` is not.
_NO_FMA = {"enable_fp_fusion": False}


@triton.jit
def _log(x):
    """`noise.log_float32`, step by step."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 127
    m = ((bits & 0x007FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    big = m > 1.41421354
    exponent += big.to(tl.int32)
    m = tl.where(big, m * 0.5, m)
    s = tl.div_rn(m - 1.0, m + 1.0)
    z = s * s
    p = z * (2.0 / 9.0) + (2.0 / 7.0)
    p = z * p + (2.0 / 5.0)
    p = z * p + (2.0 / 3.0)
    p = z * p + 2.0
    e = exponent.to(tl.float32)
    small = e * -2.12194440e-4 + s * p
    return e * 0.693359375 + small


@triton.jit
def _gumbel(ids, k0, k1, position_low, position_high):
    """`noise.gumbel` of uint32 ids under uint32 key and position words."""
    c0, c1 = ids, tl.zeros_like(ids)
    c2, c3 = c1 + position_low, c1 + position_high
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    u = ((c0 >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return _log(_log(u) * -1.0) * -1.0  # a product keeps the sign of zero, 0 - x would not


@triton.jit(do_not_specialize=["k0", "k1", "position_low", "position_high"])
def _gumbel_kernel(ids, out, count, k0, k1, position_low, position_high, ALL: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    id = place if ALL else tl.load(ids + place, mask=inside, other=0)
    k0, k1 = k0.to(tl.uint32), k1.to(tl.uint32)
    noise = _gumbel(id.to(tl.uint32), k0, k1, position_low.to(tl.uint32), position_high.to(tl.uint32))
    tl.store(out + place, noise, mask=inside)


def _words(value: int) -> tuple[int, int]:
    """The low and the high 32 bits of a 64-bit value, as signed numbers: always one argument type for Triton."""
    low, high = value & 0xFFFFFFFF, (value >> 32) & 0xFFFFFFFF
    return (low ^ 0x80000000) - 0x80000000, (high ^ 0x80000000) - 0x80000000


class TritonSampling:
    """See `protocols.SamplingKernels`; the whole vocabulary is drawn on `device`."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)

    def gumbel(self, seed: int, position: int, token_ids: Tensor | None, vocab_size: int) -> Tensor:
        count = vocab_size if token_ids is None else token_ids.numel()
        out = torch.empty(count, dtype=torch.float32, device=self._device if token_ids is None else token_ids.device)
        if token_ids is not None and (token_ids.dim() != 1 or token_ids.dtype is not torch.int64):
            raise ValueError(f"token ids must be int64 [k], not {token_ids.dtype} {tuple(token_ids.shape)}")
        if count:
            ids = out if token_ids is None else token_ids.contiguous()
            words = (*_words(seed), *_words(position))
            grid = (triton.cdiv(count, 1024),)
            _gumbel_kernel[grid](ids, out, count, *words, ALL=token_ids is None, BLOCK=1024, **_NO_FMA)
        return out


@triton.jit
def _emit(candidates, out, N: tl.constexpr):
    """Write the N largest packed candidates, largest first."""
    for i in range(N):
        best = tl.max(candidates, 0)
        tl.store(out + i, best)
        candidates = tl.where(candidates == best, EMPTY, candidates)


@triton.jit
def _top_kernel(values, out, stride, vocab, N: tl.constexpr, BLOCK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(values + row * stride + ids, mask=ids < vocab, other=0.0)
    _emit(tl.where(ids < vocab, packed(x, ids), EMPTY), out + (row * tl.num_programs(1) + chunk) * N, N)


@triton.jit
def _merge_kernel(candidates, out, count, N: tl.constexpr, BLOCK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = chunk * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(candidates + row * count + place, mask=place < count, other=EMPTY)
    _emit(found, out + (row * tl.num_programs(1) + chunk) * N, N)


@triton.jit
def _draw_kernel(scaled, limits, seeds, positions, out, stride, vocab, BLOCK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(scaled + row * stride + ids, mask=ids < vocab, other=0.0)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    noise = _gumbel(ids.to(tl.uint32), k0, k1, position.to(tl.uint32), (position >> 32).to(tl.uint32))
    score = tl.where(x >= tl.load(limits + row), x + noise, float("-inf"))
    _emit(tl.where(ids < vocab, packed(score, ids), EMPTY), out + row * tl.num_programs(1) + chunk, 1)


def _check(values: Tensor) -> Tensor:
    """float32 [rows, vocab] with unit stride along a row."""
    if values.dim() != 2 or values.dtype is not torch.float32 or not 0 < values.shape[1] < 2**31:
        raise ValueError(f"logits must be float32 [rows, vocab], not {values.dtype} {tuple(values.shape)}")
    return values if values.stride(1) == 1 else values.contiguous()


def _room(values: Tensor, n: int) -> Tensor:
    """int64 [rows, chunks, n] for the best candidates of each chunk of each row."""
    rows, vocab = values.shape
    return torch.empty((rows, triton.cdiv(vocab, _BLOCK), n), dtype=torch.int64, device=values.device)


def _merged(candidates: Tensor) -> Tensor:
    """Packed candidates int64 [rows, chunks, n] of chunks -> ids int64 [rows, n] of the row's best, best first."""
    rows, chunks, n = candidates.shape
    while chunks > 1:
        count, chunks = chunks * n, triton.cdiv(chunks * n, _BLOCK)
        fewer = candidates.new_empty((rows, chunks, n))
        _merge_kernel[(rows, chunks)](candidates, fewer, count, N=n, BLOCK=min(triton.next_power_of_2(count), _BLOCK))
        candidates = fewer
    return 0x7FFFFFFF - (candidates[:, 0] & 0xFFFFFFFF)


def likeliest(values: Tensor, n: int) -> Tensor:
    """int64 [rows, min(n, vocab)]: ids of the largest of float32 `values` [rows, vocab], best first, n <= MAX_TOP.

    Among equals the lowest id comes first; NaN counts as the largest, as in torch.
    """
    values = _check(values)
    rows, vocab = values.shape
    n = min(n, vocab)
    if not 0 <= n <= MAX_TOP:
        raise ValueError(f"the likeliest {n} of {tuple(values.shape)}: at most {MAX_TOP} can be asked for")
    if not rows or not n:
        return torch.empty((rows, n), dtype=torch.int64, device=values.device)
    room = _room(values, triton.next_power_of_2(n))  # seven numbers to compile kernels for, not MAX_TOP
    block = min(triton.next_power_of_2(vocab), _BLOCK)
    _top_kernel[(rows, room.shape[1])](values, room, values.stride(0), vocab, N=room.shape[2], BLOCK=block, num_warps=8)
    return _merged(room)[:, :n]


def greedy(values: Tensor) -> Tensor:
    """int64 [rows]: the id of the largest of float32 `values` [rows, vocab]; the lowest id wins a tie."""
    return likeliest(values, 1)[:, 0]


def logprobs(logits: Tensor, tokens: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of raw `logits` [rows, vocab]: float32 [rows] of `tokens` (int64 [rows]), then the likeliest `n` per row:
    int64 ids and float32 log-probabilities [rows, n], best first. Banned tokens have -inf."""
    mass = logits.logsumexp(dim=-1, keepdim=True)
    ids = likeliest(logits, n)
    return (logits.gather(1, tokens[:, None]) - mass)[:, 0], ids, logits.gather(1, ids) - mass


def scale(logits: Tensor, temperatures: Tensor) -> Tensor:
    """float32 [rows, vocab]: logits less their peak, over float32 `temperatures` [rows]; the largest value is 0."""
    peak = logits.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    return (logits - peak) / temperatures.clamp(min=_COLDEST)[:, None]


def draw(scaled: Tensor, limits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Gumbel-max (Gumbel, 1954) among what reaches its row's limit; int64 [rows].

    `scaled` float32 [rows, vocab] is from `scale`, `limits` float32 [rows] from `thresholds` (-inf cuts nothing);
    `seeds` int64 [rows] hold the 64 bits of each seed, `positions` int64 [rows] the position of the token drawn.
    """
    scaled = _check(scaled)
    rows, vocab = scaled.shape
    if not rows:
        return torch.empty(0, dtype=torch.int64, device=scaled.device)
    room = _room(scaled, 1)
    block = min(triton.next_power_of_2(vocab), _BLOCK)
    _draw_kernel[(rows, room.shape[1])](
        scaled, limits, seeds, positions, room, scaled.stride(0), vocab, BLOCK=block, num_warps=8, **_NO_FMA
    )
    return _merged(room)[:, 0]
