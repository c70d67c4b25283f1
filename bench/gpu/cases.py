"""Paged attention to check on a GPU: pools poisoned with NaN, any size, and what must come out, in float64.

Owns cases and the judgement; no kernel. Everything is made on the device at once, so that contexts of 131072 tokens and
batches of 512 cost milliseconds. Invariant: whatever a kernel may not read is NaN, or a block id that is not there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.gpu.section import Sink
from bench.report import Check
from pd_kernels.protocols import DecodeBatch, PrefillBatch

# Of each value, plus as much of the root mean square of all: averages over long contexts are small numbers.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
_SCORE_BYTES = 1 << 31  # of float64 scores held at a time
GARBAGE = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    contexts: tuple[int, ...]
    queries: tuple[int, ...] = ()  # rows per request; none: one each, as in decoding
    kv_heads: int = 8
    group: int = 4
    dim: int = 128
    block_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    num_blocks: int = 0  # of the pool, when more than needed; the last one is then always used
    most_rows: int = 4096  # of the result that are compared, spread over all
    is_wide: bool = False  # queries are a view of a tensor whose other columns are NaN

    @property
    def rows(self) -> tuple[int, ...]:
        return self.queries or (1,) * len(self.contexts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    q: Tensor  # [rows, q_heads, dim]
    kv: Tensor  # [num_blocks, 2, kv_heads, block_size, dim], the second layer of two
    tables: Tensor  # int32 [requests, max_blocks + 2]


def build(case: Case, device: str, seed: int) -> Built:
    generator = torch.Generator(device).manual_seed(seed)
    size = case.block_size
    counts = torch.tensor([-(-context // size) for context in case.contexts], device=device)
    total, widest = int(counts.sum()), int(counts.max())
    num_blocks = max(total + 3, case.num_blocks)
    pool = torch.full((num_blocks, 2, 2, case.kv_heads, size, case.dim), float("nan"), dtype=case.dtype, device=device)
    kv = pool[:, 1]
    ids = torch.randperm(num_blocks, generator=generator, device=device)[:total]
    if case.num_blocks:
        ids = torch.where((ids == num_blocks - 1).any() | (torch.arange(total, device=device) > 0), ids, num_blocks - 1)
    for part in ids.split(1024):  # type: ignore[no-untyped-call]
        shape = (len(part), *kv.shape[1:])
        kv[part] = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(case.dtype)
    tables = torch.full((len(counts), widest + 2), GARBAGE, dtype=torch.int32, device=device)
    is_used = torch.arange(widest + 2, device=device) < counts[:, None]
    tables[is_used] = ids.to(torch.int32)
    _poison_tails(case, kv, tables, counts)
    heads = case.kv_heads * case.group
    wide = torch.full((sum(case.rows), 2 * heads, case.dim), float("nan"), dtype=case.dtype, device=device)
    q = wide[:, :heads]
    q.copy_(2 * torch.randn(q.shape, generator=generator, device=device, dtype=torch.float32))
    return Built(q=q if case.is_wide else q.contiguous(), kv=kv, tables=tables)


def _poison_tails(case: Case, kv: Tensor, tables: Tensor, counts: Tensor) -> None:
    """Rows of each last block that are past the context."""
    contexts = torch.tensor(case.contexts, device=kv.device)
    held = contexts > 0
    last = tables.gather(1, (counts - 1).clamp(min=0)[:, None]).long()[held, 0]
    used = contexts[held] - (counts[held] - 1) * case.block_size
    is_past = torch.arange(case.block_size, device=kv.device) >= used[:, None]
    kv[last] = kv[last].masked_fill(is_past[:, None, None, :, None], float("nan"))


def prefill_batch(case: Case, tables: Tensor) -> PrefillBatch:
    return PrefillBatch(
        query_start=torch.tensor([0, *case.rows]).cumsum(0).to(tables),
        context_lens=torch.tensor(case.contexts).to(tables),
        block_tables=tables,
        max_query=max(case.rows),
        max_context=max(case.contexts),
    )


def decode_batch(case: Case, tables: Tensor) -> DecodeBatch:
    lens = torch.tensor(case.contexts).to(tables)
    return DecodeBatch(context_lens=lens, block_tables=tables, max_context=max(case.contexts))


def expected(case: Case, built: Built) -> tuple[Tensor, Tensor]:
    """Row numbers, and float64 [rows, q_heads, dim]: attention by its definition for these rows."""
    share = max(case.most_rows // max(len(case.contexts), 1), 1)
    numbers, results, begin = [], [], 0
    for request, (context, count) in enumerate(zip(case.contexts, case.rows, strict=True)):
        if count and context:
            picked = torch.linspace(0, count - 1, min(count, share), dtype=torch.float64).round().long()
            picked = picked.to(built.q.device)
            numbers.append(begin + picked)
            results.append(_attention(case, built, request, begin + picked, context - count + picked))
        begin += count
    return torch.cat(numbers), torch.cat(results)


def _attention(case: Case, built: Built, request: int, rows: Tensor, positions: Tensor) -> Tensor:
    context = case.contexts[request]
    blocks = built.tables[request, : -(-context // case.block_size)].long()
    cached = built.kv[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context]  # [2, kv_heads, tokens, dim]
    step = max(1, _SCORE_BYTES // (8 * case.group * context))
    out = torch.empty((len(rows), *built.q.shape[1:]), dtype=torch.float64, device=built.q.device)
    visible = torch.arange(context, device=built.q.device)
    for head in range(case.kv_heads):
        keys, values = cached[:, head].double()
        heads = slice(head * case.group, (head + 1) * case.group)
        for part, place in zip(rows.split(step), torch.arange(len(rows)).split(step), strict=True):  # type: ignore[no-untyped-call]
            scores = built.q[part, heads].double() @ keys.T * case.dim**-0.5
            at = positions[place.to(positions.device)]
            scores.masked_fill_((visible > at[:, None])[:, None], float("-inf"))
            out[place.to(out.device), heads] = torch.softmax(scores, -1) @ values
    return out


def judge(sink: Sink, name: str, actual: Tensor, wanted: Tensor, tolerance: float, **about: Any) -> None:
    """A check of the largest error in units of the tolerance: at most 1; NaN is never."""
    if actual.shape != wanted.shape:
        sink.holds(name, False, f"shape {tuple(actual.shape)}, not {tuple(wanted.shape)}")
        return
    exact = wanted.double()
    allowed = tolerance * (exact.abs() + exact.square().mean().sqrt() + 1e-30)
    errors = ((actual.double() - exact).abs() / allowed).nan_to_num(nan=float("inf"), posinf=float("inf"))
    worst = float(errors.max()) if errors.numel() else 0.0
    reason = ""
    if worst > 1:
        num_bad = int((errors > 1).sum())
        first = tuple((errors > 1).nonzero()[0].tolist())
        reason = f"{num_bad} of {errors.numel()} values, the first at {first}; {about}"
    sink.check(Check(name=name, value=min(worst, 1e9), bound="<= 1 of the tolerance", is_ok=worst <= 1, reason=reason))
