"""What surrounds attention, in Triton: norms, rotation with the cache write, the SiLU gate; linear layers are cuBLAS's.

Owns the kernels, their launch shapes and the checks before a launch; owns no cache. Statistics are float32.
Invariant: results are contiguous, in the dtype of the input; a negative slot (padding of a CUDA graph) writes nothing.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913 (a kernel takes every stride)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from pd_kernels.int8 import Int8Linear
from pd_kernels.protocols import PackedLinear

MAX_HIDDEN = 32768  # one program holds a whole row
MAX_HEAD_DIM = 512
_HEAD_TILE = 1024  # elements of half heads per program
_SILU_BLOCK = 1024
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    x_stride,
    residual_stride,
    hidden,
    eps,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    wide = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        place = residual + row * residual_stride + column
        total = wide + tl.load(place, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(residual.dtype.element_ty)  # the norm sees what the residual keeps
        tl.store(place, rounded, mask=inside)
        wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / hidden + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + column, (wide * scale * gain).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul_kernel(gate_up, out, stride, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    source = gate_up + row * stride + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + inner, mask=inside, other=0.0).to(tl.float32)
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * inner + column, gated.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rope_write_kernel(
    qkv,
    rope,
    slots,
    kv,
    q,
    q_weight,
    k_weight,
    eps,
    qkv_stride,
    kv_block_stride,
    kv_kind_stride,
    kv_head_stride,
    kv_offset_stride,
    kv_dim_stride,
    q_heads,
    kv_heads,
    block_size,
    NORMS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """A tile of HEADS heads of one token; heads in the order of qkv: queries, keys, values. a and b are halves."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, HALF_BLOCK)
    in_half = (column < HALF)[None, :]
    inside = (head < q_heads + 2 * kv_heads)[:, None] & in_half
    source = qkv + token * qkv_stride + head[:, None] * (2 * HALF) + column[None, :]
    raw_a = tl.load(source, mask=inside, other=0.0)
    raw_b = tl.load(source + HALF, mask=inside, other=0.0)
    a, b = raw_a.to(tl.float32), raw_b.to(tl.float32)
    is_query = (head < q_heads)[:, None]
    if NORMS:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        q_a = tl.load(q_weight + column, mask=column < HALF, other=0.0).to(tl.float32)
        q_b = tl.load(q_weight + HALF + column, mask=column < HALF, other=0.0).to(tl.float32)
        k_a = tl.load(k_weight + column, mask=column < HALF, other=0.0).to(tl.float32)
        k_b = tl.load(k_weight + HALF + column, mask=column < HALF, other=0.0).to(tl.float32)
        a = a * scale * tl.where(is_query, q_a[None, :], k_a[None, :])
        b = b * scale * tl.where(is_query, q_b[None, :], k_b[None, :])
    angles = rope + token * (2 * HALF) + column
    cosine = tl.load(angles, mask=column < HALF, other=0.0)[None, :]
    sine = tl.load(angles + HALF, mask=column < HALF, other=0.0)[None, :]
    turned_a, turned_b = a * cosine - b * sine, b * cosine + a * sine

    place = q + token * q_heads * (2 * HALF) + head[:, None] * (2 * HALF) + column[None, :]
    tl.store(place, turned_a.to(q.dtype.element_ty), mask=is_query & in_half)
    tl.store(place + HALF, turned_b.to(q.dtype.element_ty), mask=is_query & in_half)

    slot = tl.load(slots + token)
    block = (slot // block_size) * kv_block_stride + (slot % block_size) * kv_offset_stride
    is_value = (head >= q_heads + kv_heads)[:, None]
    kv_head = (head - q_heads - tl.where(head >= q_heads + kv_heads, kv_heads, 0))[:, None].to(tl.int64)
    row = kv + block + tl.where(is_value, 1, 0).to(tl.int64) * kv_kind_stride + kv_head * kv_head_stride
    kept = inside & (head >= q_heads)[:, None] & (slot >= 0)
    kind = kv.dtype.element_ty
    low, high = column.to(tl.int64)[None, :] * kv_dim_stride, (column + HALF).to(tl.int64)[None, :] * kv_dim_stride
    tl.store(row + low, tl.where(is_value, raw_a.to(kind), turned_a.to(kind)), mask=kept)
    tl.store(row + high, tl.where(is_value, raw_b.to(kind), turned_b.to(kind)), mask=kept)


def _rows(x: Tensor, name: str) -> Tensor:
    """`x` [rows, width] with unit stride along a row."""
    if x.dim() != 2 or x.dtype not in _FLOATS:
        raise ValueError(f"{name} must be [rows, width] of a float dtype, not {tuple(x.shape)} {x.dtype}")
    return x if x.stride(1) == 1 else x.contiguous()


def _warps(elements: int) -> int:
    """Of a program that holds `elements` at once: 1 to 16, a power of two."""
    return min(max(elements // 256, 1), 16)


class TritonLayer:
    """See `protocols.LayerKernels`; any of float32, bfloat16, float16."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(_rows(x, "x"), None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The sum is rounded to the dtype of `residual` before its norm is taken, as the reference does."""
        if residual.shape != x.shape or residual.dtype is not x.dtype or residual.stride(-1) != 1:
            raise ValueError(
                f"residual must be rows of {x.dtype} shaped like x, {tuple(x.shape)}, "
                f"not {tuple(residual.shape)} {residual.dtype} with strides {residual.stride()}"
            )
        return self._norm(_rows(x, "x"), residual, weight, eps)

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        rows, hidden = x.shape
        if not 0 < hidden <= MAX_HIDDEN or weight.shape != (hidden,):
            raise ValueError(f"a norm of {tuple(x.shape)} by {tuple(weight.shape)}: rows have 1 to {MAX_HIDDEN} values")
        out = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
        if rows:
            block = triton.next_power_of_2(hidden)
            added = x if residual is None else residual
            _rms_norm_kernel[(rows,)](
                x,
                added,
                weight.contiguous(),
                out,
                x.stride(0),
                added.stride(0),
                hidden,
                eps,
                ADDS=residual is not None,
                BLOCK=block,
                num_warps=_warps(block),
            )
        return out

    def rope_write(
        self, qkv: Tensor, rope: Tensor, slots: Tensor, kv: Tensor, norms: tuple[Tensor, Tensor, float] | None
    ) -> Tensor:
        """`kv` may have any strides; a row with a negative slot writes nothing, its query is still returned."""
        qkv = _rows(qkv, "qkv")
        tokens, width = qkv.shape
        _check_rope_write(qkv, rope, slots, kv)
        kv_heads, block_size, dim = kv.shape[2:]
        heads = width // dim
        q = torch.empty((tokens, heads - 2 * kv_heads, dim), dtype=qkv.dtype, device=qkv.device)
        if not tokens:
            return q
        q_weight, k_weight, eps = norms if norms is not None else (qkv, qkv, 0.0)
        if norms is not None and not q_weight.shape == k_weight.shape == (dim,):
            raise ValueError(f"norms of heads of {dim}: {tuple(q_weight.shape)}, {tuple(k_weight.shape)}")
        half = triton.next_power_of_2(dim // 2)
        tile = min(triton.next_power_of_2(heads), max(_HEAD_TILE // half, 1))
        _rope_write_kernel[(tokens, triton.cdiv(heads, tile))](
            qkv,
            rope.contiguous(),
            slots.contiguous(),
            kv,
            q,
            q_weight.contiguous() if norms is not None else qkv,
            k_weight.contiguous() if norms is not None else qkv,
            eps,
            qkv.stride(0),
            *kv.stride(),
            q.shape[1],
            kv_heads,
            block_size,
            NORMS=norms is not None,
            HALF=dim // 2,
            HALF_BLOCK=half,
            HEADS=tile,
            num_warps=_warps(2 * tile * half),
        )
        return q

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate_up = _rows(gate_up, "gate_up")
        rows, width = gate_up.shape
        if width % 2:
            raise ValueError(f"gate_up must be [rows, 2 * inner], not {tuple(gate_up.shape)}")
        inner = width // 2
        out = torch.empty((rows, inner), dtype=gate_up.dtype, device=gate_up.device)
        if out.numel():
            grid = (rows, triton.cdiv(inner, _SILU_BLOCK))
            _silu_mul_kernel[grid](gate_up, out, gate_up.stride(0), inner, BLOCK=_SILU_BLOCK)
        return out

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None, *, float32_out: bool = False, int8: bool = False
    ) -> PackedLinear:
        """torch's product; with `float32_out`, half precision on CUDA leaves cuBLAS's float32 sums unrounded.

        `int8` works, in float32 and slowly: no GPU serves such weights yet.
        """
        if int8:
            return Int8Linear(weight, bias, float32_out)
        if not float32_out:
            return lambda x: functional.linear(x, weight, bias)
        if weight.is_cuda and weight.dtype is not torch.float32 and _mm_takes_out_dtype():
            return lambda x: _wide_product(x, weight, bias)
        return lambda x: functional.linear(x, weight, bias).float()


def _check_rope_write(qkv: Tensor, rope: Tensor, slots: Tensor, kv: Tensor) -> None:
    tokens, width = qkv.shape
    shapes = f"rope_write of qkv {tuple(qkv.shape)} into kv {tuple(kv.shape)}"
    if kv.dim() != 5 or kv.shape[1] != 2 or kv.dtype is not qkv.dtype:
        raise ValueError(f"{shapes} {kv.dtype}: kv is [num_blocks, 2, kv_heads, block_size, head_dim] of {qkv.dtype}")
    dim = kv.shape[4]
    if dim % 2 or not 0 < dim <= MAX_HEAD_DIM or width % dim or width // dim <= 2 * kv.shape[2]:
        raise ValueError(f"{shapes}: heads of {dim} must be even, at most {MAX_HEAD_DIM}, and fill the rows of qkv")
    if slots.shape != (tokens,) or slots.dtype is not torch.int64:
        raise ValueError(f"{shapes}: slots must be int64 [{tokens}], not {slots.dtype} {tuple(slots.shape)}")
    if rope.shape != (tokens, 2, dim // 2) or rope.dtype is not torch.float32:
        raise ValueError(f"{shapes}: rope must be float32 [{tokens}, 2, {dim // 2}], not {tuple(rope.shape)}")


def _mm_takes_out_dtype() -> bool:
    """torch.mm learned `out_dtype` on CUDA in 2.8."""
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (2, 8)


def _wide_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    mm: Any = torch.mm  # the argument is newer than the stubs of the oldest torch allowed
    sums: Tensor = mm(x, weight.t(), out_dtype=torch.float32)
    return sums if bias is None else sums + bias
