"""Speed of the attention kernels beside the GPU's own ceilings, and what tuning of tiles would gain.

Owns the workloads (heads of an 8B Llama) and their targets; `rivals` owns the others' kernels on the same numbers.
Invariant: nothing else runs meanwhile, and what is compared is timed in the same way.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from bench.gpu import blocks, decode, prefill, rivals
from bench.gpu.cases import Case, build
from bench.gpu.environment import ceilings
from bench.gpu.section import Setting, Sink
from bench.gpu.timing import device_s
from bench.report import at_least
from pd_kernels.triton.tiles import Phase, TileBook, Tiles, table_tiles
from pd_kernels.triton.tune import Problem, tune

PREFILL_SHARE, DECODE_SHARE = 0.55, 0.80  # of the best GEMM, of the read bandwidth
RESERVE_S = 45.0  # after tuning: its second measurement, and the slowest rival
TRY_S = 4.0  # to compile and time one size of tiles

PREFILL = (
    Case(name="8192 in one", contexts=(8192,), queries=(8192,)),
    Case(name="8192 of 32768", contexts=(32768,), queries=(8192,)),
    Case(name="63 of 64 and one of 4096", contexts=(64,) * 63 + (4096,), queries=(64,) * 63 + (4096,)),
    Case(name="512 of 8192", contexts=(8192,), queries=(512,)),
)
DECODE = (
    Case(name="64 x 4096", contexts=(4096,) * 64),
    Case(name="1 x 131072", contexts=(131072,)),
    Case(name="1 x 4096", contexts=(4096,)),
    Case(name="256 x 1024", contexts=(1024,) * 256),
    Case(name="63 x 1024 and one of 65536", contexts=(1024,) * 63 + (65536,)),
)
TARGETS = ("8192 in one", "64 x 4096", "1 x 131072")
_SMALL = {"kv_heads": 1, "group": 2, "dim": 16, "block_size": 16, "dtype": torch.float32}
DRY_PREFILL = (Case(name="8192 in one", contexts=(24,), queries=(24,), **_SMALL),)  # type: ignore[arg-type]
DRY_DECODE = (Case(name="64 x 4096", contexts=(40, 40), **_SMALL),)  # type: ignore[arg-type]


def run(setting: Setting, sink: Sink) -> None:
    best = ceilings(setting)
    chunks, steps = (DRY_PREFILL, DRY_DECODE) if setting.is_dry else (PREFILL, DECODE)
    for case in chunks:
        sink.attempt(f"prefill {case.name}", setting, partial(_prefill, setting, sink, case, best["gemm"]))
    for case in steps:
        sink.attempt(f"decode {case.name}", setting, partial(_decode, setting, sink, case, best["read"]))
    copy = best.get("copy", 2 * best["read"])
    sink.attempt("blocks speed", setting, partial(blocks.speed, setting, sink, copy))
    for rival in (rivals.sdpa, rivals.flashinfer):
        work = partial(rival, setting, sink, chunks[0], steps[0])
        sink.attempt(f"vs_{rival.__name__}", setting, work, is_needed=False)
    if setting.left_s > 70 or setting.is_dry:
        sink.attempt("tuning", setting, partial(_tuning, setting, sink, chunks[0], steps[0]))
    if setting.left_s > 35 and not setting.is_dry:  # last: compiling it may take long, and cannot be stopped
        sink.attempt("vs_flex", setting, partial(rivals.flex, setting, sink, chunks[0]), is_needed=False)


def prefill_flops(case: Case) -> int:
    """Two products per visible pair of positions and query head."""
    pairs = sum(n * (context - n) + n * (n + 1) // 2 for n, context in zip(case.rows, case.contexts, strict=True))
    return 4 * pairs * case.kv_heads * case.group * case.dim


def decode_bytes(case: Case) -> int:
    """Keys and values once."""
    return sum(case.contexts) * 2 * case.kv_heads * case.dim * case.dtype.itemsize


def _prefill(setting: Setting, sink: Sink, case: Case, gemm: float) -> None:
    taken_s = device_s(prefill.work(case, build(case, setting.device, setting.seed)), setting.device)
    per_s = prefill_flops(case) / taken_s
    sink.row("prefill_attention", per_s / 1e12, "TFLOP/s", ceiling=gemm / 1e12, case=case.name, us=_us(taken_s))
    if case.name in TARGETS and not setting.is_dry:
        sink.check(at_least(f"prefill attention, {case.name}", per_s / gemm, PREFILL_SHARE, "of the best GEMM"))


def _decode(setting: Setting, sink: Sink, case: Case, read: float) -> None:
    work = decode.work(case, build(case, setting.device, setting.seed))
    taken_s = device_s(work, setting.device, recorded=True)
    launched_s = device_s(work, setting.device)
    per_s = decode_bytes(case) / taken_s
    about = {"case": case.name, "us": _us(taken_s), "us_without_graph": _us(launched_s)}
    sink.row("decode_attention", per_s / 1e9, "GB/s", ceiling=read / 1e9, **about)
    if case.name in TARGETS and not setting.is_dry:
        sink.check(at_least(f"decode attention, {case.name}", per_s / read, DECODE_SHARE, "of the read bandwidth"))


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def tries(setting: Setting) -> dict[Phase, list[Tiles]]:
    """The table's own tiles and what lies near them, the likeliest first: compiling takes seconds each."""

    def rows(*sizes: tuple[int, int, int, int]) -> list[Tiles]:
        return [Tiles(rows=r, keys=k, warps=w, stages=s) for r, k, w, s in sizes]

    if setting.is_dry:
        return {"prefill": rows((16, 16, 4, 1), (32, 16, 4, 1)), "decode": rows((16, 16, 4, 1))}
    prefill = rows((128, 64, 8, 3), (128, 128, 8, 3), (64, 64, 4, 3), (128, 64, 4, 3), (128, 128, 8, 2), (64, 64, 4, 5))
    decode = rows((16, 64, 4, 3), (16, 64, 2, 5), (16, 128, 4, 3), (16, 64, 4, 7), (16, 128, 8, 3), (16, 32, 2, 7))
    phases: tuple[tuple[Phase, list[Tiles]], ...] = (("prefill", prefill), ("decode", decode))
    return {phase: [_table(setting, phase), *found] for phase, found in phases}


def _table(setting: Setting, phase: Phase) -> Tiles:
    if setting.is_dry:
        return table_tiles(phase, None, torch.float32, 16)
    return table_tiles(phase, torch.cuda.get_device_capability(setting.device), torch.bfloat16, 128)


def _tuning(setting: Setting, sink: Sink, chunk: Case, step: Case) -> None:
    """`tune` over as many of the nearest tiles as there is time for; its gain is measured on our own workloads."""
    num_tries = max(int((setting.left_s - RESERVE_S) / 2 / TRY_S), 1)
    chosen: dict[Phase, list[Tiles]] = {phase: found[:num_tries] for phase, found in tries(setting).items()}

    def measure(call: Callable[[], None]) -> float:
        return device_s(call, setting.device, repeats=5)

    problem = Problem(
        device=torch.device(setting.device),
        dtype=chunk.dtype,
        q_heads=chunk.kv_heads * chunk.group,
        kv_heads=chunk.kv_heads,
        head_dim=chunk.dim,
        block_size=chunk.block_size,
        sequences=2 if setting.is_dry else 64,
        context=max(step.contexts),
    )
    with tempfile.TemporaryDirectory(prefix="pdserve-tiles-") as folder:
        best = tune(problem, Path(folder), tries=chosen, measure=measure)
    cases: tuple[tuple[Phase, Case], ...] = (("prefill", chunk), ("decode", step))
    for phase, case in cases:
        built, usual = build(case, setting.device, setting.seed), _table(setting, phase)
        work = prefill.work if phase == "prefill" else decode.work
        before_s, after_s = (
            device_s(work(case, built, TileBook(only=tiles)), setting.device, recorded=phase == "decode")
            for tiles in (usual, best[phase])
        )
        sink.row(f"tuning_{phase}", before_s / after_s, "x", best=str(best[phase]), table=str(usual), us=_us(after_s))
