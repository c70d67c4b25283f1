"""Prefill attention against float64: every shape that is served, and the corners.

Owns the list of cases, the most telling first; `cases` builds and judges. Invariant: outputs begin as NaN.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import torch

from bench.gpu.cases import TOLERANCE, Built, Case, build, expected, judge, prefill_batch
from bench.gpu.section import Setting, Sink
from pd_kernels.protocols import PrefillAttention
from pd_kernels.reference import prefill_attention
from pd_kernels.triton.prefill import TritonPrefill
from pd_kernels.triton.tiles import TileBook

_CONTEXTS = (200, 1, 17, 64, 30, 5, 1000, 4097, 63, 65, 128)
_QUERIES = (3, 1, 17, 31, 0, 5, 1000, 500, 63, 1, 64)
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32


def cases(seed: int) -> list[Case]:
    rng = random.Random(seed)
    short = tuple(rng.randint(1, 40) for _ in range(512))
    long = tuple(n + rng.choice((0, rng.randint(1, 500))) for n in short)
    ragged = {"contexts": _CONTEXTS, "queries": _QUERIES}
    end = {"contexts": (131072,), "most_rows": 64}
    return [
        Case(name="ragged bf16", **ragged, is_wide=True),  # type: ignore[arg-type]
        Case(name="ragged fp16", **ragged, dtype=_FP16),  # type: ignore[arg-type]
        Case(name="ragged fp32", **ragged, dtype=_FP32),  # type: ignore[arg-type]
        Case(name="8192 bf16", contexts=(8192,), queries=(8192,), most_rows=256),
        Case(name="512 at 131072", **end, queries=(512,)),  # type: ignore[arg-type]
        Case(name="7 at 131072, split", **end, queries=(7,)),  # type: ignore[arg-type]
        Case(name="512 requests", contexts=long, queries=short, most_rows=2048),
        Case(name="large pool", contexts=(4096, 700), queries=(512, 700), num_blocks=10_000, most_rows=512),
        Case(name="dim 64 group 8", **ragged, dim=64, group=8, kv_heads=4, block_size=16),  # type: ignore[arg-type]
        Case(name="dim 256 group 7", **ragged, dim=256, group=7, kv_heads=2, dtype=_FP16),  # type: ignore[arg-type]
        Case(name="dim 80 group 1", **ragged, dim=80, group=1, kv_heads=4, block_size=16),  # type: ignore[arg-type]
        Case(name="dim 96 group 3", **ragged, dim=96, group=3, kv_heads=2, block_size=16),  # type: ignore[arg-type]
        Case(name="dim 64 fp32", **ragged, dim=64, group=4, kv_heads=2, dtype=_FP32),  # type: ignore[arg-type]
        Case(name="dim 256 fp32", **ragged, dim=256, group=2, kv_heads=2, dtype=_FP32),  # type: ignore[arg-type]
        Case(name="dim 32 fp32", **ragged, dim=32, group=2, kv_heads=2, dtype=_FP32),  # type: ignore[arg-type]
    ]


DRY = [
    Case(name="ragged", contexts=(40, 9, 70), queries=(9, 0, 33), kv_heads=1, dim=32, block_size=16, dtype=_FP32),
    Case(
        name="large pool", contexts=(40,), queries=(8,), kv_heads=1, dim=16, block_size=16, dtype=_FP16, num_blocks=30
    ),
]


def run(setting: Setting, sink: Sink) -> None:
    for index, case in enumerate(DRY if setting.is_dry else cases(setting.seed)):
        name = f"prefill {case.name}"
        sink.attempt(name, setting, partial(_check, setting, sink, case, name, index))


def _check(setting: Setting, sink: Sink, case: Case, name: str, index: int) -> None:
    built = build(case, setting.device, setting.seed + index)
    rows, wanted = expected(case, built)
    judge(sink, name, apply(TritonPrefill(), case, built)[rows], wanted, TOLERANCE[case.dtype], case=case.name)
    if index == 0:  # what serves where Triton cannot
        actual = apply(prefill_attention, case, built)[rows]
        judge(sink, f"reference {name}", actual, wanted, TOLERANCE[case.dtype], case=case.name)


def apply(kernel: PrefillAttention, case: Case, built: Built) -> torch.Tensor:
    out = torch.full(built.q.shape, float("nan"), dtype=built.q.dtype, device=built.q.device)
    kernel(built.q, built.kv, prefill_batch(case, built.tables), case.dim**-0.5, out)
    return out


def work(case: Case, built: Built, book: TileBook | None = None) -> Callable[[], None]:
    """One launch on fixed tensors, to be timed; the table's tiles unless `book` says otherwise."""
    kernel, batch, out = TritonPrefill(book), prefill_batch(case, built.tables), torch.empty_like(built.q)
    return lambda: kernel(built.q, built.kv, batch, case.dim**-0.5, out)
