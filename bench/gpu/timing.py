"""How long work takes on a device, and the best that the device can do.

Owns clocks, recording and the ceilings; knows no kernel of ours. Invariant: a ceiling is the best of every way tried,
so that a share of it is never flattered.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
import triton
import triton.language as tl

from bench.ceilings import Ceiling

Work = Callable[[], object]


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def wall_s(work: Work, device: str, repeats: int) -> float:
    """The median of `repeats` runs, each waited for, after two that are not counted."""
    times = []
    for index in range(repeats + 2):
        start_s = time.perf_counter()
        work()
        synchronize(device)
        if index >= 2:
            times.append(time.perf_counter() - start_s)
    return median(times)


def device_s(work: Work, device: str, *, repeats: int = 10, rounds: int = 3, recorded: bool = False) -> float:
    """Seconds of one run when runs follow each other without a gap: the median of `rounds` rounds of `repeats`.

    With `recorded` a round is one CUDA graph, so that launching costs nothing, as in a served decode step.
    """
    if not device.startswith("cuda"):
        return wall_s(work, device, 1)
    work()
    torch.cuda.synchronize(device)
    run = _recorded(work, repeats) if recorded else lambda: [work() for _ in range(repeats)]
    run()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / repeats)
    return float(median(times))


def _recorded(work: Work, repeats: int) -> Work:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            work()
    return graph.replay


@triton.jit
def _read_kernel(source, out, BLOCK: tl.constexpr):
    """One program reads BLOCK values and leaves their sum."""
    program = tl.program_id(0)
    values = tl.load(source + program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + program, tl.sum(values, 0))


def read_ceiling(device: str, num_bytes: int) -> Ceiling:
    """Bytes read per second from a buffer of `num_bytes`, which should be many times the cache."""
    buffer = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)

    def ways() -> Iterator[tuple[str, Work]]:
        yield "torch.sum", lambda: buffer.sum()
        yield "torch.amax", lambda: buffer.amax()
        for block in (4096, 8192, 16384):
            out = torch.empty(buffer.numel() // block, dtype=torch.float32, device=device)
            grid = (out.numel(),)
            yield f"triton, {block} a program", partial(_read_kernel[grid], buffer, out, BLOCK=block, num_warps=8)

    return _best(ways(), device, buffer.nbytes)


def copy_ceiling(device: str, num_bytes: int) -> Ceiling:
    """Bytes read and written per second, both counted, copying `num_bytes`."""
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return _best(iter([("torch copy_", lambda: target.copy_(source))]), device, 2 * source.nbytes)


def gemm_ceiling(device: str, sizes: tuple[int, ...], dtype: torch.dtype) -> Ceiling:
    """FLOP per second of square products of random numbers, the best of `sizes`."""
    best = Ceiling(per_s=0.0, how="")
    for size in sizes:
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        found = _best(iter([(f"{size} cubed", partial(torch.matmul, a, b))]), device, 2 * size**3)
        best = max(best, found, key=lambda each: each.per_s)
    return best


def _best(ways: Iterator[tuple[str, Work]], device: str, amount: int) -> Ceiling:
    found = (Ceiling(per_s=amount / device_s(work, device), how=how) for how, work in ways)
    return max(found, key=lambda each: each.per_s)
