"""Norms, rotation with the cache write, gate and products against float64 on the same GPU.

Owns shapes and tolerances. Invariant: what a kernel may not write is compared bit for bit with what it was.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu.cases import judge
from bench.gpu.section import Setting, Sink
from pd_kernels.triton.layer import TritonLayer

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
EPS = 1e-5
LAYER = TritonLayer()


class Heads(NamedTuple):
    tokens: int
    kv_heads: int
    group: int
    dim: int


class _Layer:
    def __init__(self, setting: Setting, sink: Sink) -> None:
        self._setting, self._sink = setting, sink
        self._generator = torch.Generator(setting.device).manual_seed(setting.seed)

    def rand(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        values = torch.randn(shape, generator=self._generator, device=self._setting.device)
        return values.to(dtype)

    def norms(self, dtype: torch.dtype, rows: int, hidden: int) -> None:
        name, tolerance = f"{_short(dtype)} {rows} x {hidden}", TOLERANCE[dtype]
        x, weight = self.rand(rows, hidden, dtype=dtype), self.rand(hidden, dtype=dtype)
        judge(self._sink, f"rms_norm {name}", LAYER.rms_norm(x, weight, EPS), _rms_norm(x, weight), tolerance)
        wide = self.rand(rows, 3 * hidden, dtype=dtype)  # rows that are not adjacent
        residual, before, kept = wide[:, hidden : 2 * hidden], wide.clone(), x.clone()
        total = (x.float() + residual.float()).to(dtype)
        actual = LAYER.add_rms_norm(x, residual, weight, EPS)
        judge(self._sink, f"add_rms_norm {name}", actual, _rms_norm(total, weight), tolerance)
        is_cut = self._setting.is_dry and dtype is torch.bfloat16  # the interpreter does not round
        before[:, hidden : 2 * hidden] = residual if is_cut else total
        self._sink.holds(f"add_rms_norm {name} writes the sum alone", _same(wide, before) and _same(x, kept))

    def rope(self, dtype: torch.dtype, heads: Heads, normed: bool, num_blocks: int) -> None:
        """Two layers, the second is written; every slot is another, two rows have none."""
        tokens, kv_heads, group, dim = heads
        name = f"rope_write {_short(dtype)} {tuple(heads)}{' norms' if normed else ''}"
        block_size = 16
        size = (num_blocks, 2, 2, kv_heads, block_size, dim)
        pool = torch.full(size, float("nan"), dtype=dtype, device=self._setting.device)
        qkv, angles = self.rand(tokens, (group + 2) * kv_heads * dim, dtype=dtype), self.rand(tokens, dim // 2)
        rope = torch.stack((angles.cos(), angles.sin()), dim=1)
        norms = (self.rand(dim, dtype=dtype), self.rand(dim, dtype=dtype), EPS) if normed else None
        last = num_blocks * block_size - 1
        slots = torch.randperm(last, generator=self._generator, device=self._setting.device)[:tokens]
        slots[0] = last
        slots[1:3] = torch.tensor([-1, -7], device=slots.device)
        wanted = _rope(qkv, rope, kv_heads, dim, norms)
        q_heads = kv_heads * group
        actual = LAYER.rope_write(qkv, rope, slots, pool[:, 1], norms)
        judge(self._sink, f"{name} queries", actual, wanted[:, :q_heads], 4 * TOLERANCE[dtype])
        kept = slots >= 0
        block, offset = slots[kept] // block_size, slots[kept] % block_size
        rows = pool[:, 1][block, :, :, offset]  # [tokens, 2, kv_heads, dim]
        keys = wanted[kept, q_heads : q_heads + kv_heads]
        judge(self._sink, f"{name} keys", rows[:, 0], keys, 4 * TOLERANCE[dtype])
        values = qkv.view(tokens, -1, dim)[kept, q_heads + kv_heads :]
        num_written = int(sum((~part.isnan()).sum() for part in pool.split(1024)))  # type: ignore[no-untyped-call]
        is_exact = torch.equal(rows[:, 1], values) and num_written == 2 * values.numel()
        self._sink.holds(f"{name} values and nothing else", is_exact, f"{num_written} of {2 * values.numel()} written")

    def gate(self, dtype: torch.dtype, rows: int, inner: int) -> None:
        gate_up = self.rand(rows, 2 * inner, dtype=dtype) * 4
        gate_up[0, :3] = torch.tensor([-100.0, 100.0, 0.0])
        gate, up = gate_up.double().chunk(2, dim=-1)
        actual = LAYER.silu_mul(gate_up)
        judge(
            self._sink,
            f"silu_mul {_short(dtype)} {rows} x {inner}",
            actual,
            functional.silu(gate) * up,
            4 * TOLERANCE[dtype],
        )

    def linear(self, dtype: torch.dtype, rows: int, n: int, k: int) -> None:
        """On a GPU, float32 sums leave unrounded where asked for."""
        x, weight, bias = self.rand(rows, k, dtype=dtype), self.rand(n, k, dtype=dtype), self.rand(n, dtype=dtype)
        wanted = functional.linear(x.double(), weight.double(), bias.double())
        for float32_out in (False, True):
            is_unrounded = float32_out and not self._setting.is_dry
            tolerance = 2e-5 if dtype is torch.float32 else 1e-4 if is_unrounded else TOLERANCE[dtype]
            actual = LAYER.pack_linear(weight, bias, float32_out=float32_out)(x)
            name = f"linear {_short(dtype)} {rows} x {k} x {n}{' to float32' if float32_out else ''}"
            judge(self._sink, name, actual, wanted, tolerance)


def run(setting: Setting, sink: Sink) -> None:
    layer = _Layer(setting, sink)
    rows = (3,) if setting.is_dry else (1, 17, 512, 8192)
    hidden = (100,) if setting.is_dry else (64, 576, 2048, 4096, 8192, 16384)
    inner = (40,) if setting.is_dry else (100, 8192, 14336)
    shapes = [Heads(5, 2, 3, 16)] if setting.is_dry else _rope_shapes()
    for dtype in DTYPES:
        short = _short(dtype)
        for n, width in product(rows, hidden):
            sink.attempt(f"norms {short} {n} x {width}", setting, partial(layer.norms, dtype, n, width))
        for n, width in product(rows, inner):
            sink.attempt(f"silu_mul {short}", setting, partial(layer.gate, dtype, n, width))
        for heads, normed in product(shapes, (False, True)):
            blocks = heads.tokens + 8
            sink.attempt(f"rope_write {short}", setting, partial(layer.rope, dtype, heads, normed, blocks))
        size = (3, 24, 40) if setting.is_dry else (64, 8192, 4096)
        sink.attempt(f"linear {short}", setting, partial(layer.linear, dtype, *size))
    if not setting.is_dry:  # 2 layers x 2 x 8 heads x 16 x 128 values: 40000 blocks are 2.6e9
        large = partial(layer.rope, torch.bfloat16, Heads(64, 8, 4, 128), False, 40_000)
        sink.attempt("rope_write large pool", setting, large)


def _rope_shapes() -> list[Heads]:
    groups = [Heads(33, 2, group, 64) for group in (1, 3, 7, 8)]
    dims = [Heads(33, 2, 4, dim) for dim in (16, 80, 96, 256)]
    return [Heads(8192, 8, 4, 128), Heads(3, 8, 4, 128), *groups, *dims]


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    exact = x.double()
    return exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + EPS) * weight.double()


def _rope(qkv: Tensor, rope: Tensor, kv_heads: int, dim: int, norms: tuple[Tensor, Tensor, float] | None) -> Tensor:
    """float64 [tokens, heads, dim]: all heads, rotated; of the values only the shape is meant."""
    heads = qkv.view(qkv.shape[0], -1, dim).double()
    if norms is not None:
        q_heads = heads.shape[1] - 2 * kv_heads
        q, k, rest = heads[:, :q_heads], heads[:, q_heads : q_heads + kv_heads], heads[:, q_heads + kv_heads :]
        heads = torch.cat((_rms_norm(q, norms[0]), _rms_norm(k, norms[1]), rest), dim=1)
    a, b = heads.chunk(2, dim=-1)
    cosine, sine = rope[:, None, 0].double(), rope[:, None, 1].double()
    return torch.cat((a * cosine - b * sine, b * cosine + a * sine), dim=-1)
