"""Measures tile sizes on this machine, off the serving path, and keeps the fastest in the kernel cache folder.

Owns the candidates and the workloads; the file format is in `tiles`.
Invariant: a candidate is only timed, never trusted: it computes the same attention as any other, at another speed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import triton

from pd_kernels.protocols import DecodeBatch, PrefillBatch
from pd_kernels.triton.decode import TritonDecode
from pd_kernels.triton.prefill import TritonPrefill
from pd_kernels.triton.tiles import Phase, TileBook, Tiles, save

Measure = Callable[[Callable[[], None]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One model's attention, and the workload to be fast at."""

    device: torch.device
    dtype: torch.dtype
    q_heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    sequences: int = 32  # of a decode batch; a prefill batch has one
    context: int = 4096  # tokens per sequence; a prefill chunk is the second half of it


def candidates(phase: Phase) -> list[Tiles]:
    """Every combination worth a try; those that do not fit the device fail to compile and are passed over."""
    if phase == "prefill":
        sizes = product((64, 128), (32, 64, 128), (4, 8), (2, 3, 5))
    else:
        sizes = product((16,), (32, 64, 128), (2, 4, 8), (3, 5, 7))
    return [Tiles(rows=r, keys=k, warps=w, stages=s) for r, k, w, s in sizes]


def tune(
    problem: Problem, folder: Path, *, tries: dict[Phase, list[Tiles]] | None = None, measure: Measure | None = None
) -> dict[Phase, Tiles]:
    """The fastest tiles per phase, also saved in `folder` for a `TileBook`.

    `tries` restricts the candidates, `measure` times one call, lower is better. Raises ValueError when no candidate
    of a phase can run here, OSError when the folder cannot be written.
    """
    phases: tuple[Phase, ...] = ("prefill", "decode")
    best = {
        phase: _fastest(problem, phase, tries[phase] if tries else candidates(phase), measure or median_ms)
        for phase in phases
    }
    save(folder, problem.device, problem.dtype, problem.head_dim, best)
    return best


def median_ms(call: Callable[[], None]) -> float:
    """Of ten calls after three, each waited for."""
    times = []
    for i in range(13):
        begin = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if i >= 3:
            times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def _fastest(problem: Problem, phase: Phase, tries: list[Tiles], measure: Measure) -> Tiles:
    workload = _prefill_call if phase == "prefill" else _decode_call
    timed: list[tuple[float, Tiles]] = []
    for tiles in tries:
        try:
            timed.append((measure(workload(problem, TileBook(only=tiles))), tiles))
        except (triton.OutOfResources, RuntimeError):  # too much shared memory, or the assembler gave up
            continue
    if not timed:
        raise ValueError(f"none of {len(tries)} tile sizes runs {phase} attention for {problem}")
    return min(timed, key=lambda pair: pair[0])[1]


def _cache(problem: Problem, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks, and tables that spread each sequence over the pool."""
    blocks = triton.cdiv(problem.context, problem.block_size)
    shape = (sequences * blocks, 2, problem.kv_heads, problem.block_size, problem.head_dim)
    kv = torch.randn(shape, device=problem.device, dtype=problem.dtype)
    tables = torch.randperm(sequences * blocks, device=problem.device).to(torch.int32).view(sequences, blocks)
    return kv, tables


def _queries(problem: Problem, rows: int) -> torch.Tensor:
    return torch.randn((rows, problem.q_heads, problem.head_dim), device=problem.device, dtype=problem.dtype)


def _prefill_call(problem: Problem, book: TileBook) -> Callable[[], None]:
    kv, tables = _cache(problem, 1)
    chunk = max(problem.context // 2, 1)
    batch = PrefillBatch(
        query_start=torch.tensor([0, chunk], dtype=torch.int32, device=problem.device),
        context_lens=torch.tensor([problem.context], dtype=torch.int32, device=problem.device),
        block_tables=tables,
        max_query=chunk,
        max_context=problem.context,
    )
    q, kernel = _queries(problem, chunk), TritonPrefill(book)
    out = torch.empty_like(q)
    return lambda: kernel(q, kv, batch, problem.head_dim**-0.5, out)


def _decode_call(problem: Problem, book: TileBook) -> Callable[[], None]:
    kv, tables = _cache(problem, problem.sequences)
    batch = DecodeBatch(
        context_lens=torch.full((problem.sequences,), problem.context, dtype=torch.int32, device=problem.device),
        block_tables=tables,
        max_context=problem.context,
    )
    q, kernel = _queries(problem, problem.sequences), TritonDecode(book)
    out = torch.empty_like(q)
    return lambda: kernel(q, kv, batch, problem.head_dim**-0.5, out)
