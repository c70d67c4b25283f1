"""Blocks between a pool and a staging buffer: the bytes asked for, all of them and no other, and how fast.

Owns shapes; torch's indexing is the truth. Invariant: buffers hold random bits, NaN patterns among them.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from bench.gpu.section import Setting, Sink
from bench.gpu.timing import device_s
from pd_kernels.triton.blocks import gather, scatter


def run(setting: Setting, sink: Sink) -> None:
    small = (9, 600) if setting.is_dry else (300, 1 << 20)
    parts = [(0, small[1]), (1, 7), (2, 30), (8, 128), (6, 501), (3, small[1] - 3)]
    for part in parts:
        sink.attempt(f"blocks {part}", setting, partial(_check, setting, sink, small, part))
    if not setting.is_dry:  # 2.6e9 and 4.6e9 bytes
        sink.attempt("blocks large pool", setting, lambda: _check(setting, sink, (40_000, 1 << 16), (0, 1 << 16)))
        sink.attempt("blocks large offset", setting, lambda: _check(setting, sink, (1_100, 1 << 22), (4096, 1 << 21)))


def _random(setting: Setting, *shape: int, seed: int) -> Tensor:
    generator = torch.Generator(setting.device).manual_seed(setting.seed + seed)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8, device=setting.device)


def _check(setting: Setting, sink: Sink, shape: tuple[int, int], part: tuple[int, int]) -> None:
    name, (num_blocks, _), (offset, size) = f"blocks {shape} bytes {part}", shape, part
    pool = _random(setting, *shape, seed=0)
    ids = torch.tensor([num_blocks - 1, 0, -1, 3, num_blocks, -(2**40), num_blocks // 2], device=setting.device)
    real = (ids >= 0) & (ids < num_blocks)
    staging = _random(setting, len(ids), size, seed=1)
    wanted = staging.clone()
    wanted[real] = pool[ids[real], offset : offset + size]
    gather(pool, ids, staging, offset=offset, size=size)
    sink.holds(f"gather {name}", torch.equal(staging, wanted))
    sent = _random(setting, len(ids), size, seed=2)
    before = pool.clone()
    before[ids[real], offset : offset + size] = sent[real]
    scatter(pool, ids, sent, offset=offset, size=size)
    sink.holds(f"scatter {name}", torch.equal(pool, before))


def speed(setting: Setting, sink: Sink, copy: float) -> None:
    """512 blocks of 2 MiB in any order, beside copying at `copy` bytes/s; not in `run`, which others run beside."""
    block_bytes = 1 << (10 if setting.is_dry else 21)
    pool = _random(setting, 1024, block_bytes, seed=0)
    ids = torch.randperm(1024, device=setting.device)[:512]
    staging = torch.empty((512, block_bytes), dtype=torch.uint8, device=setting.device)
    for name, work in (("gather", gather), ("scatter", scatter)):
        taken_s = device_s(lambda w=work: w(pool, ids, staging), setting.device, repeats=3)  # type: ignore[misc]
        moved = 2 * staging.nbytes
        sink.row(f"blocks_{name}", moved / taken_s / 1e9, "GB/s", ceiling=copy / 1e9, blocks=512, bytes=block_bytes)
