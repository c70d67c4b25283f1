"""Llamas of random weights made on the device, without files: the shapes that served speed is measured on.

Owns shapes and how weights are drawn; the model code is the one that serves. Invariant: every weight has memory of its
own, as a loaded model's has, so that no cache flatters a step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pd_kernels.protocols import KernelSet, PackedLinear
from pdserve.model.decoder import Decoder
from pdserve.model.runner import Runner
from pdserve.model.spec import ModelSpec, Rope
from pdserve.model.weights import LayerWeights, Weights


class Shape(NamedTuple):
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    is_tied: bool


SHAPES = {
    "1B": Shape(2048, 16, 32, 8, 64, 8192, 128_256, True),
    "8B": Shape(4096, 32, 32, 8, 128, 14_336, 128_256, False),
}
DRY_SHAPES = {"tiny": Shape(32, 2, 4, 2, 16, 48, 101, False)}


def spec_of(name: str, shape: Shape) -> ModelSpec:
    return ModelSpec(
        architecture="LlamaForCausalLM",
        hidden_size=shape.hidden,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.inner,
        vocab_size=shape.vocab,
        rms_eps=1e-5,
        rope=Rope(theta=500_000.0),
        tied_embeddings=shape.is_tied,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_window=None,
        max_positions=131_072,
        bos_token_id=None,
        eos_token_ids=(),
        fingerprint=f"random {name}",
    )


def random_weights(spec: ModelSpec, kernels: KernelSet, device: torch.device, dtype: torch.dtype, seed: int) -> Weights:
    """Drawn so that activations keep their size: a standard deviation of 1 / sqrt(inputs)."""
    generator = torch.Generator(device).manual_seed(seed)
    num_bytes = 0

    def draw(rows: int, columns: int) -> Tensor:
        nonlocal num_bytes
        weight = torch.empty((rows, columns), dtype=dtype, device=device)
        weight.normal_(std=columns**-0.5, generator=generator)
        num_bytes += weight.nbytes
        return weight

    def linear(rows: int, columns: int) -> PackedLinear:
        return kernels.layer.pack_linear(draw(rows, columns), None)

    def ones() -> Tensor:
        return torch.ones(spec.hidden_size, dtype=dtype, device=device)

    hidden, inner, width = spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim
    embedding = draw(spec.vocab_size, hidden) * hidden**0.5
    layers = tuple(
        LayerWeights(
            input_norm=ones(),
            qkv=linear(spec.qkv_size, hidden),
            qk_norms=None,
            output=linear(hidden, width),
            post_norm=ones(),
            gate_up=linear(2 * inner, hidden),
            down=linear(hidden, inner),
        )
        for _ in range(spec.num_layers)
    )
    head = embedding / hidden**0.5 if spec.tied_embeddings else draw(spec.vocab_size, hidden)
    return Weights(
        embedding=embedding,
        layers=layers,
        norm=ones(),
        lm_head=kernels.layer.pack_linear(head, None, float32_out=True),
        device=device,
        dtype=dtype,
        weight_bytes=num_bytes,
    )


def runner_of(spec: ModelSpec, weights: Weights, kernels: KernelSet, num_blocks: int, block_size: int) -> Runner:
    """Over a pool of ordinary numbers, so that attention has something to weigh."""
    dtype = str(weights.dtype).removeprefix("torch.")
    layout = spec.kv_layout(dtype=dtype, block_size=block_size)
    kv = torch.empty(layout.shape(num_blocks), dtype=weights.dtype, device=weights.device).normal_(std=0.5)
    return Runner(Decoder(spec, weights, kernels), kv)


def linear_params(spec: ModelSpec) -> int:
    """Weights of one token's products, without lm_head."""
    heads, hidden, inner = spec.num_heads * spec.head_dim, spec.hidden_size, spec.intermediate_size
    return spec.num_layers * (spec.qkv_size * hidden + hidden * heads + 3 * hidden * inner)


def prefill_flops(spec: ModelSpec, num_tokens: int) -> int:
    """Products of every token, causal attention, one row of logits."""
    attention = 2 * num_tokens * (num_tokens + 1) * spec.num_heads * spec.head_dim * spec.num_layers
    return 2 * num_tokens * linear_params(spec) + attention + 2 * spec.vocab_size * spec.hidden_size


def decode_bytes(spec: ModelSpec, batch: int, context: int, item_bytes: int) -> int:
    """All weights of products once, each sequence's keys and values once."""
    weights = linear_params(spec) + spec.vocab_size * spec.hidden_size
    cache = 2 * batch * context * spec.num_kv_heads * spec.head_dim * spec.num_layers
    return (weights + cache) * item_bytes
