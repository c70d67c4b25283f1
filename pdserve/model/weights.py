"""Weights of one model on one device, in the layout that the kernels want.

Owns reading tensors, fusing QKV and gate-up, and packing; the folder was checked by `spec` and `checkpoint`.
Invariant: this is the only place that turns files into weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pd_kernels.protocols import KernelSet, PackedLinear
from pdserve.errors import ModelError
from pdserve.model.checkpoint import Checkpoint, open_checkpoint
from pdserve.model.spec import ModelSpec

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    input_norm: Tensor  # [hidden]
    qkv: PackedLinear  # hidden -> (heads + 2 * kv_heads) * head_dim
    qk_norms: tuple[Tensor, Tensor, float] | None  # query weight, key weight [head_dim], eps
    output: PackedLinear  # heads * head_dim -> hidden
    post_norm: Tensor  # [hidden]
    gate_up: PackedLinear  # hidden -> 2 * intermediate
    down: PackedLinear  # intermediate -> hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    lm_head: PackedLinear  # hidden -> vocab, in float32
    device: torch.device
    dtype: torch.dtype
    weight_bytes: int  # in the precision served; a copy that a kernel makes of a tied embedding is not counted


def load(
    directory: Path, spec: ModelSpec, *, device: str, dtype: str, kernels: KernelSet, int8: bool = False
) -> Weights:
    """Read, fuse and pack layer by layer, so that the peak is the packed model and one layer.

    With `int8` the products keep integers and one scale per output (weight-only); embedding and norms stay as they are.
    """
    reader = _Reader(open_checkpoint(directory), torch.device(device), DTYPES[dtype], kernels, int8=int8)
    try:
        embedding = reader.read("model.embed_tokens.weight").clone()
        layers = tuple(_load_layer(reader, spec, f"model.layers.{layer}.") for layer in range(spec.num_layers))
        norm = reader.read("model.norm.weight").clone()
        head = embedding if spec.tied_embeddings else reader.read("lm_head.weight").clone()
        lm_head = kernels.layer.pack_linear(head, None, float32_out=True, int8=int8)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{directory}: the weights cannot be read: {error}") from None
    finally:
        reader.close()
    return Weights(
        embedding=embedding,
        layers=layers,
        norm=norm,
        lm_head=lm_head,
        device=torch.device(device),
        dtype=DTYPES[dtype],
        weight_bytes=reader.num_bytes,
    )


def _load_layer(reader: _Reader, spec: ModelSpec, prefix: str) -> LayerWeights:
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    norms = None
    if spec.qk_norm:
        query, key = (reader.read(f"{attention}{name}_norm.weight").clone() for name in ("q", "k"))
        norms = (query, key, spec.rms_eps)
    return LayerWeights(
        input_norm=reader.read(f"{prefix}input_layernorm.weight").clone(),
        qkv=reader.linear([f"{attention}{name}_proj" for name in ("q", "k", "v")], spec.qkv_bias),
        qk_norms=norms,
        output=reader.linear([f"{attention}o_proj"], spec.output_bias),
        post_norm=reader.read(f"{prefix}post_attention_layernorm.weight").clone(),
        gate_up=reader.linear([f"{mlp}gate_proj", f"{mlp}up_proj"], spec.mlp_bias),
        down=reader.linear([f"{mlp}down_proj"], spec.mlp_bias),
    )


class _Reader:
    """Open shards and a count of the bytes taken from them, in the precision served."""

    def __init__(
        self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, kernels: KernelSet, *, int8: bool
    ) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._dtype = dtype
        self._kernels = kernels
        self._int8 = int8
        self._open_files: dict[Path, Any] = {}
        self.num_bytes = 0

    def read(self, name: str) -> Tensor:
        """The tensor on the device in the served precision; it may still be mapped from the file."""
        file = self._checkpoint.tensors[name].file
        if file not in self._open_files:
            self._open_files[file] = safe_open(str(file), framework="pt")
        tensor: Tensor = self._open_files[file].get_tensor(name).to(device=self._device, dtype=self._dtype)
        self.num_bytes += tensor.nbytes
        return tensor

    def linear(self, names: list[str], has_bias: bool) -> PackedLinear:
        """One packed product for `names`, stacked along the outputs."""
        weight = torch.cat([self.read(f"{name}.weight") for name in names])
        bias = torch.cat([self.read(f"{name}.bias") for name in names]) if has_bias else None
        if self._int8:
            self.num_bytes += weight.numel() + 4 * weight.shape[0] - weight.nbytes
        return self._kernels.layer.pack_linear(weight, bias, int8=self._int8)

    def close(self) -> None:
        self._open_files.clear()
