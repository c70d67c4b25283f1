"""Decode attention against float64: every shape that is served, the corners, and a recorded graph.

Owns the list of cases, the most telling first; `cases` builds and judges. Invariant: outputs begin as NaN.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import torch

from bench.gpu.cases import TOLERANCE, Built, Case, build, decode_batch, expected, judge
from bench.gpu.section import Setting, Sink
from pd_kernels.protocols import DecodeAttention, DecodeBatch
from pd_kernels.reference import decode_attention
from pd_kernels.triton.decode import TritonDecode
from pd_kernels.triton.tiles import TileBook

_RAGGED = (1, 63, 64, 65, 127, 128, 129, 500, 33, 257, 4097, 1000)
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32


def cases(seed: int) -> list[Case]:
    rng = random.Random(seed)
    many = tuple(rng.randint(1, 2048) for _ in range(512))
    mixed = (131072, *(rng.randint(1, 300) for _ in range(200)))
    return [
        Case(name="ragged bf16", contexts=_RAGGED, is_wide=True),
        Case(name="ragged fp16", contexts=_RAGGED, dtype=_FP16),
        Case(name="ragged fp32", contexts=_RAGGED, dtype=_FP32),
        Case(name="batch 512", contexts=many),
        Case(name="131072 twice", contexts=(131072, 131071)),
        Case(name="131072 and 200 short", contexts=mixed),
        Case(name="131072 fp32", contexts=(131072,), dtype=_FP32, kv_heads=2),
        Case(name="large pool", contexts=(4096, 700), num_blocks=10_000),
        Case(name="dim 64 group 8", contexts=_RAGGED, dim=64, group=8, kv_heads=4, block_size=16),
        Case(name="dim 256 group 7", contexts=_RAGGED, dim=256, group=7, kv_heads=2, dtype=_FP16),
        Case(name="dim 80 group 1", contexts=_RAGGED, dim=80, group=1, kv_heads=4, block_size=16),
        Case(name="dim 96 group 3", contexts=_RAGGED, dim=96, group=3, kv_heads=2, block_size=16),
        Case(name="dim 128 group 71", contexts=_RAGGED, group=71, kv_heads=1),
        Case(name="dim 64 fp32", contexts=_RAGGED, dim=64, group=4, kv_heads=2, dtype=_FP32),
        Case(name="dim 256 fp32", contexts=_RAGGED, dim=256, group=2, kv_heads=2, dtype=_FP32),
        Case(name="dim 32 fp32", contexts=_RAGGED, dim=32, group=2, kv_heads=2, dtype=_FP32),
    ]


DRY = [
    Case(name="ragged", contexts=(40, 1, 300), kv_heads=1, dim=32, block_size=16, dtype=_FP32),
    Case(name="large pool", contexts=(40,), kv_heads=1, dim=16, block_size=16, dtype=_FP16, num_blocks=30),
]


def run(setting: Setting, sink: Sink) -> None:
    chosen = DRY if setting.is_dry else cases(setting.seed)
    for index, case in enumerate(chosen):
        name = f"decode {case.name}"
        sink.attempt(name, setting, partial(_check, setting, sink, case, name, index))
    sink.attempt("decode padding", setting, lambda: _padding(setting, sink, chosen[0]))
    sink.attempt("decode graph", setting, lambda: _graph(setting, sink, chosen[0]))


def _check(setting: Setting, sink: Sink, case: Case, name: str, index: int) -> None:
    built = build(case, setting.device, setting.seed + index)
    rows, wanted = expected(case, built)
    judge(sink, name, apply(TritonDecode(), case, built)[rows], wanted, TOLERANCE[case.dtype], case=case.name)
    if index == 0:  # what serves where Triton cannot
        actual = apply(decode_attention, case, built)[rows]
        judge(sink, f"reference {name}", actual, wanted, TOLERANCE[case.dtype], case=case.name)


def apply(kernel: DecodeAttention, case: Case, built: Built) -> torch.Tensor:
    out = torch.full(built.q.shape, float("nan"), dtype=built.q.dtype, device=built.q.device)
    kernel(built.q, built.kv, decode_batch(case, built.tables), case.dim**-0.5, out)
    return out


def work(case: Case, built: Built, book: TileBook | None = None) -> Callable[[], None]:
    """One launch on fixed tensors, to be timed; the table's tiles unless `book` says otherwise."""
    kernel, batch, out = TritonDecode(book), decode_batch(case, built.tables), torch.empty_like(built.q)
    return lambda: kernel(built.q, built.kv, batch, case.dim**-0.5, out)


def _padding(setting: Setting, sink: Sink, case: Case) -> None:
    """A row without context is zeros and leaves the others alone."""
    built = build(case, setting.device, setting.seed)
    rows, wanted = expected(case, built)
    batch = decode_batch(case, built.tables)
    batch.context_lens[0] = 0
    out = torch.full(built.q.shape, float("nan"), dtype=built.q.dtype, device=built.q.device)
    TritonDecode()(built.q, built.kv, batch, case.dim**-0.5, out)
    sink.holds("decode padding is zeros", bool((out[0] == 0).all()), "a row of context 0 is not zeros")
    judge(sink, "decode beside padding", out[rows[1:]], wanted[1:], TOLERANCE[case.dtype])


def _graph(setting: Setting, sink: Sink, case: Case) -> None:
    """Recorded once with contexts of 1 token, replayed with others: all that changes is what tensors hold."""
    built = build(case, setting.device, setting.seed)
    rows, wanted = expected(case, built)
    lens = torch.ones(len(case.contexts), dtype=torch.int32, device=setting.device)
    tables = built.tables[:, :1].repeat(1, built.tables.shape[1])
    batch = DecodeBatch(context_lens=lens, block_tables=tables, max_context=max(case.contexts))
    out = torch.empty(built.q.shape, dtype=built.q.dtype, device=built.q.device)
    kernel = TritonDecode()

    def step() -> None:
        kernel(built.q, built.kv, batch, case.dim**-0.5, out)

    step()
    graph = None
    if not setting.is_dry:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    lens.copy_(decode_batch(case, built.tables).context_lens)
    tables.copy_(built.tables)
    out.fill_(float("nan"))
    if graph is None:
        step()
    else:
        graph.replay()
    judge(sink, "decode graph", out[rows], wanted, TOLERANCE[case.dtype])
