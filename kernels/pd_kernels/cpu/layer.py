"""Native kernels around attention, and the native noise.

Owns allocation of results and the C calls; linear layers are in `linear.py`. Statistics are float32 in C++.
Invariant: results are contiguous, in the dtype of the input.
"""

from __future__ import annotations

from ctypes import addressof

import torch
from torch import Tensor

from pd_kernels.cpu.arena import Arena
from pd_kernels.cpu.library import Library, RopeShape
from pd_kernels.cpu.linear import pack, pack_int8
from pd_kernels.protocols import PackedLinear


class CpuLayer:
    """See `protocols.LayerKernels`; one dtype, float32 or bfloat16."""

    def __init__(self, library: Library, dtype: torch.dtype) -> None:
        self._library = library
        self._dtype = dtype
        self._is_bf16 = int(dtype is torch.bfloat16)
        self._arena = Arena()
        self._rms_norm, self._silu_mul, self._rope_write = library.rms_norm, library.silu_mul, library.rope_write

    def _expect(self, *tensors: Tensor) -> None:
        for x in tensors:
            if x.dtype is not self._dtype:
                raise ValueError(f"these kernels were selected for {self._dtype}, not {x.dtype} {tuple(x.shape)}")

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        self._expect(x, weight)
        x = x.contiguous()
        out = torch.empty_like(x)
        rows, n = x.shape
        self._rms_norm(self._is_bf16, x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), rows, n, eps)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        self._expect(x, residual, weight)
        if not residual.is_contiguous() or residual.shape != x.shape:
            raise ValueError(
                f"residual must be contiguous and shaped like x, {tuple(x.shape)}, not {tuple(residual.shape)}"
            )
        x = x.contiguous()
        out = torch.empty_like(x)
        rows, n = x.shape
        self._rms_norm(
            self._is_bf16, x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, n, eps
        )
        return out

    def rope_write(
        self, qkv: Tensor, rope: Tensor, slots: Tensor, kv: Tensor, norms: tuple[Tensor, Tensor, float] | None
    ) -> Tensor:
        self._expect(qkv, kv)
        qkv, rope, slots = qkv.contiguous(), rope.contiguous(), slots.contiguous()
        tokens, width = qkv.shape
        _, _, kv_heads, block_size, dim = kv.shape
        q_heads = width // dim - 2 * kv_heads
        if width % dim or kv.stride(4) != 1 or slots.dtype is not torch.int64 or rope.dtype is not torch.float32:
            raise ValueError(f"rope_write of qkv {tuple(qkv.shape)} into kv {tuple(kv.shape)} {kv.stride()}")
        shape = RopeShape(tokens, q_heads, kv_heads, dim, block_size, *kv.stride()[:4])
        q_weight = k_weight = None
        eps = 0.0
        if norms is not None:
            self._expect(norms[0], norms[1])
            q_weight, k_weight, eps = norms[0].data_ptr(), norms[1].data_ptr(), norms[2]
        q = torch.empty((tokens, q_heads, dim), dtype=qkv.dtype)
        self._rope_write(
            self._is_bf16,
            qkv.data_ptr(),
            rope.data_ptr(),
            slots.data_ptr(),
            kv.data_ptr(),
            q_weight,
            k_weight,
            eps,
            q.data_ptr(),
            addressof(shape),
        )
        return q

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        self._expect(gate_up)
        gate_up = gate_up.contiguous()
        rows, width = gate_up.shape
        out = torch.empty((rows, width // 2), dtype=gate_up.dtype)
        self._silu_mul(self._is_bf16, gate_up.data_ptr(), out.data_ptr(), rows, width // 2)
        return out

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None, *, float32_out: bool = False, int8: bool = False
    ) -> PackedLinear:
        self._expect(weight)
        pack_in = pack_int8 if int8 else pack
        return pack_in(self._library, self._arena, weight, bias, float32_out)


class CpuSampling:
    """See `protocols.SamplingKernels`."""

    def __init__(self, library: Library) -> None:
        self._gumbel = library.gumbel

    def gumbel(self, seed: int, position: int, token_ids: Tensor | None, vocab_size: int) -> Tensor:
        ids = None if token_ids is None else token_ids.contiguous()
        count = vocab_size if ids is None else ids.numel()
        out = torch.empty(count, dtype=torch.float32)
        self._gumbel(
            seed & (2**64 - 1), position & (2**64 - 1), None if ids is None else ids.data_ptr(), count, out.data_ptr()
        )
        return out
