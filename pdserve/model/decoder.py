"""One forward pass of a Llama-family decoder over a flat list of tokens of many requests.

Owns the order of the products; the kernels own how each is computed, the runner what a batch holds.
Invariant: rows do not see each other except through the block tables, so batch mates cannot change a meaning.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pd_kernels.protocols import DecodeBatch, DecoderShape, KernelSet, PrefillBatch
from pdserve.model.rope import rope_table
from pdserve.model.spec import ModelSpec
from pdserve.model.weights import LayerWeights, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of one step: the decode rows come first, then the prefill chunks."""

    tokens: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows]
    slots: Tensor  # int64 [rows]: block * block_size + offset
    num_decode: int
    decode: DecodeBatch | None  # of rows [0, num_decode)
    prefill: PrefillBatch | None  # of the other rows
    sampled: Tensor | None  # int64 [sampled rows]; None means every row


class Decoder:
    def __init__(self, spec: ModelSpec, weights: Weights, kernels: KernelSet) -> None:
        self.spec = spec
        self.weights = weights
        self.kernels = kernels
        self._scale = spec.head_dim**-0.5
        self._rope = rope_table(spec.rope, spec.head_dim, 0)
        shape = DecoderShape(
            hidden=spec.hidden_size,
            inner=spec.intermediate_size,
            q_heads=spec.num_heads,
            head_dim=spec.head_dim,
            scale=self._scale,
            eps=spec.rms_eps,
            final_norm=weights.norm,
        )
        self._fused = kernels.fuse(weights.layers, shape) if kernels.fuse is not None else None

    def forward(self, batch: Batch, kv: Tensor) -> Tensor:
        """Write the rows' keys and values into `kv`; float32 logits [sampled rows, vocab].

        `kv` is [num_blocks, layers, 2, kv_heads, block_size, head_dim].
        """
        layer_kernels, weights = self.kernels.layer, self.weights
        eps = self.spec.rms_eps
        rope = self._rope_rows(batch)
        residual = weights.embedding.index_select(0, batch.tokens)
        if self._fused is not None:
            rows = self._fused(residual, rope, batch, kv)
            if rows is not None:
                return weights.lm_head(rows) if len(rows) else self._no_logits(residual)
        normed = layer_kernels.rms_norm(residual, weights.layers[0].input_norm, eps)
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            queries = layer_kernels.rope_write(layer.qkv(normed), rope, batch.slots, kv[:, index], layer.qk_norms)
            if index == last and batch.sampled is not None and batch.sampled.numel() == 0:
                return self._no_logits(residual)
            mixed = self._attend(queries, kv[:, index], batch)
            if index == last and batch.sampled is not None:
                mixed, residual = (rows.index_select(0, batch.sampled) for rows in (mixed, residual))
            normed = self._mlp(layer, mixed, residual)
            following = weights.norm if index == last else weights.layers[index + 1].input_norm
            normed = layer_kernels.add_rms_norm(normed, residual, following, eps)
        return weights.lm_head(normed)

    def _no_logits(self, like: Tensor) -> Tensor:
        return like.new_empty((0, self.spec.vocab_size), dtype=torch.float32)

    def _attend(self, queries: Tensor, kv: Tensor, batch: Batch) -> Tensor:
        """[rows, heads, head_dim] -> [rows, heads * head_dim]."""
        out = torch.empty_like(queries)
        split = batch.num_decode
        if batch.decode is not None:
            self.kernels.decode(queries[:split], kv, batch.decode, self._scale, out[:split])
        if batch.prefill is not None:
            self.kernels.prefill(queries[split:], kv, batch.prefill, self._scale, out[split:])
        return out.flatten(1)

    def _mlp(self, layer: LayerWeights, mixed: Tensor, residual: Tensor) -> Tensor:
        """Add attention to `residual` in place; return the MLP's output, which is still to be added to it."""
        layer_kernels = self.kernels.layer
        normed = layer_kernels.add_rms_norm(layer.output(mixed), residual, layer.post_norm, self.spec.rms_eps)
        return layer.down(layer_kernels.silu_mul(layer.gate_up(normed)))

    def _rope_rows(self, batch: Batch) -> Tensor:
        """Float32 [rows, 2, head_dim / 2]; the table grows to the longest context seen."""
        needed = max(
            batch.decode.max_context if batch.decode is not None else 0,
            batch.prefill.max_context if batch.prefill is not None else 0,
        )
        self.grow_rope(needed)
        return self._rope.index_select(0, batch.positions)

    def grow_rope(self, num_tokens: int) -> None:
        """Have the rotations of at least so many positions."""
        if num_tokens > self._rope.shape[0]:
            length = max(1024, 1 << (num_tokens - 1).bit_length())
            self._rope = rope_table(self.spec.rope, self.spec.head_dim, length).to(self.weights.device)
