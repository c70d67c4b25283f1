"""All layers of a decoder in one native call, for models whose linear layers are all native.

Owns the description of a step that C++ walks through (mirrors of decoder.h) and the scratch memory between kernels; the
arithmetic is that of the single kernels, bit for bit. Invariant: a step that cannot run so is left to the caller.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import addressof, c_float, c_int64, c_void_p

import torch
from torch import Tensor

from pd_kernels.cpu.arena import Arena
from pd_kernels.cpu.attention import check_lengths, shape_of
from pd_kernels.cpu.library import AttentionShape, Library, RopeShape
from pd_kernels.cpu.linear import NativeLinear
from pd_kernels.protocols import DecoderShape, LayerParts, StepRows

BLOCK_ROWS = 128  # rows whose wide activations fit the second cache level
MOST_SCRATCH_ROWS = 8192  # larger steps run kernel by kernel


class _Linear(ctypes.Structure):
    _fields_ = (
        ("kind", c_int64),
        ("weight", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        ("qkv", _Linear),
        ("output", _Linear),
        ("gate_up", _Linear),
        ("down", _Linear),
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qk_eps", c_float),
    )


_NUMBERS = (
    *("is_bf16", "use_amx", "threads", "num_layers", "rows", "num_decode", "num_sampled"),
    *("hidden", "q_size", "inner", "layer_stride", "block_rows"),
)
_INPUTS = (
    *("layers", "final_norm", "rope", "slots", "sampled", "kv"),
    *("decode_contexts", "decode_tables", "query_start", "prefill_contexts", "prefill_tables"),
)
_SCRATCH = ("residual", "normed", "qkv", "q", "mixed", "projected", "gate_up", "inner_rows")


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in _NUMBERS),
        ("eps", c_float),
        *((name, c_void_p) for name in _INPUTS),
        ("rope_shape", RopeShape),
        ("decode", AttentionShape),
        ("prefill", AttentionShape),
        *((name, c_void_p) for name in _SCRATCH),
    )


class CpuFused:
    """See `protocols.FusedLayers`."""

    def __init__(
        self, library: Library, layers: Sequence[LayerParts], shape: DecoderShape, most_rows: int, dtype: torch.dtype
    ) -> None:
        self._call = library.decoder
        self._shape, self._dtype = shape, dtype
        self._most_rows = min(most_rows, MOST_SCRATCH_ROWS)
        self._keep = layers  # their tensors own the memory that the description points to
        self._layers = (_Layer * len(layers))(*map(_layer, layers))
        self._arena_rows = self._most_threads = 0
        self._scratch: dict[str, Tensor] = {}
        self._fixed = {
            "is_bf16": int(dtype is torch.bfloat16),
            "use_amx": int(library.has_amx),
            "num_layers": len(layers),
            "hidden": shape.hidden,
            "q_size": shape.q_heads * shape.head_dim,
            "inner": shape.inner,
            "block_rows": BLOCK_ROWS,
            "eps": shape.eps,
            "layers": addressof(self._layers),
            "final_norm": shape.final_norm.data_ptr(),
        }

    def __call__(self, residual: Tensor, rope: Tensor, step: StepRows, kv: Tensor) -> Tensor | None:
        rows = residual.shape[0]
        if rows > self._most_rows or residual.dtype is not self._dtype or kv.dtype is not self._dtype:
            return None
        residual, rope = residual.contiguous(), rope.contiguous()
        sampled, scratch = step.sampled, self._room(rows)
        q = scratch["q"][:rows].view(rows, self._shape.q_heads, self._shape.head_dim)
        attention: dict[str, object] = {}
        if step.decode is not None:
            check_lengths(step.decode.block_tables, step.decode.context_lens)
            attention["decode"] = shape_of(q, kv[:, 0], step.decode.block_tables, self._shape.scale)
            attention["decode_contexts"] = step.decode.context_lens.data_ptr()
            attention["decode_tables"] = step.decode.block_tables.data_ptr()
        if step.prefill is not None:
            check_lengths(step.prefill.block_tables, step.prefill.context_lens, step.prefill.query_start)
            attention["prefill"] = shape_of(q, kv[:, 0], step.prefill.block_tables, self._shape.scale)
            attention["prefill_contexts"] = step.prefill.context_lens.data_ptr()
            attention["prefill_tables"] = step.prefill.block_tables.data_ptr()
            attention["query_start"] = step.prefill.query_start.data_ptr()
        kv_heads, block_size, dim = kv.shape[3:]
        rope_shape = RopeShape(rows, self._shape.q_heads, kv_heads, dim, block_size, kv.stride(0), *kv.stride()[2:5])
        description = _Step(
            **self._fixed,
            **attention,
            **{name: buffer.data_ptr() for name, buffer in scratch.items()},
            threads=torch.get_num_threads(),
            rows=rows,
            num_decode=step.num_decode,
            num_sampled=-1 if sampled is None else sampled.numel(),
            layer_stride=kv.stride(1),
            rope=rope.data_ptr(),
            slots=step.slots.data_ptr(),
            sampled=None if sampled is None else sampled.data_ptr(),
            kv=kv.data_ptr(),
            rope_shape=rope_shape,
            residual=residual.data_ptr(),
        )
        self._call(addressof(description))
        return scratch["normed"][: rows if sampled is None else sampled.numel()]

    def _room(self, rows: int) -> dict[str, Tensor]:
        """Scratch for so many rows, in huge pages, kept until a larger step comes."""
        threads = torch.get_num_threads()
        if rows > self._arena_rows or threads > self._most_threads:
            self._most_threads = threads
            self._arena_rows = min(self._most_rows, max(64, 1 << (rows - 1).bit_length()))
            shape, arena = self._shape, Arena()
            block = BLOCK_ROWS * self._most_threads
            q_size = shape.q_heads * shape.head_dim
            sizes = {
                "normed": (self._arena_rows, shape.hidden),
                "qkv": (self._arena_rows, self._layers[0].qkv.n),
                "q": (self._arena_rows, q_size),
                "mixed": (self._arena_rows, q_size),
                "projected": (block, shape.hidden),
                "gate_up": (block, 2 * shape.inner),
                "inner_rows": (block, shape.inner),
            }
            self._scratch = {name: arena.empty(size, self._dtype) for name, size in sizes.items()}
        return self._scratch


def fuse(library: Library, layers: Sequence[LayerParts], shape: DecoderShape, dtype: torch.dtype) -> CpuFused | None:
    """None when a linear layer has no native form."""
    linears: list[object] = [part for layer in layers for part in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    most_rows = min((part.most_rows if isinstance(part, NativeLinear) else 0 for part in linears), default=0)
    return CpuFused(library, layers, shape, most_rows, dtype) if most_rows else None


def _linear(linear: object) -> _Linear:
    assert isinstance(linear, NativeLinear)
    return _Linear(*linear.native)


def _layer(parts: LayerParts) -> _Layer:
    query, key, eps = parts.qk_norms or (None, None, 0.0)
    return _Layer(
        _linear(parts.qkv),
        _linear(parts.output),
        _linear(parts.gate_up),
        _linear(parts.down),
        parts.input_norm.data_ptr(),
        parts.post_norm.data_ptr(),
        None if query is None else query.data_ptr(),
        None if key is None else key.data_ptr(),
        eps,
    )
