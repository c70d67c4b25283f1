"""The reference kernel set: every kernel in plain torch, on any device, in float32, bfloat16 or float16.

Owns what the other sets are held to, and what CUDA runs where no tuned set exists; owns no layout and no choice.
Invariant: unused cache rows and table entries never reach a result, whatever they hold.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pd_kernels import noise
from pd_kernels.int8 import Int8Linear
from pd_kernels.protocols import DecodeBatch, KernelSet, PackedLinear, PrefillBatch


def reference_set(device: str, why: str) -> KernelSet:
    return KernelSet(
        name="reference",
        why=why,
        prefill=prefill_attention,
        decode=decode_attention,
        layer=ReferenceLayer(),
        sampling=ReferenceSampling(torch.device(device)),
    )


def _gather(kv: Tensor, tables: Tensor, context_lens: Tensor, max_context: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [sequences, kv_heads, tokens, head_dim] with unused rows zeroed, and which rows are used."""
    block_size = kv.shape[3]
    position = torch.arange(max_context, device=kv.device)
    used = position < context_lens[:, None]  # [sequences, tokens]
    block = tables.long()[:, position // block_size].where(used, 0)
    offset = (position % block_size).expand_as(block)
    rows = kv[block, :, :, offset]  # [sequences, tokens, 2, kv_heads, head_dim]
    rows = rows.masked_fill(~used[:, :, None, None, None], 0.0)
    keys, values = rows.permute(2, 0, 3, 1, 4)
    return keys, values, used


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """[n, heads, queries, dim] against [n, kv_heads, tokens, dim]; CUDA's kernels keep float32 sums by themselves."""
    work = torch.float32 if q.device.type == "cpu" else q.dtype
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.to(work).repeat_interleave(group, dim=1) for x in (keys, values))
    return functional.scaled_dot_product_attention(q.to(work), keys, values, attn_mask=mask, scale=scale).to(q.dtype)


def prefill_attention(q: Tensor, kv: Tensor, batch: PrefillBatch, scale: float, out: Tensor) -> None:
    """See `protocols.PrefillAttention`; one request after the other."""
    starts, contexts = batch.query_start.tolist(), batch.context_lens.tolist()
    for r, context in enumerate(contexts):
        begin, end = starts[r], starts[r + 1]
        if begin == end:
            continue
        keys, values, _ = _gather(kv, batch.block_tables[r : r + 1], batch.context_lens[r : r + 1], context)
        position = torch.arange(context, device=q.device)
        visible = position[None, :] <= position[context - (end - begin) :, None]
        rows = q[begin:end].transpose(0, 1)[None]
        out[begin:end] = _attend(rows, keys, values, visible[None, None], scale)[0].transpose(0, 1)


def decode_attention(q: Tensor, kv: Tensor, batch: DecodeBatch, scale: float, out: Tensor) -> None:
    """See `protocols.DecodeAttention`; all sequences at once, padded to the longest, no device synchronization."""
    keys, values, used = _gather(kv, batch.block_tables, batch.context_lens, batch.max_context)
    out.copy_(_attend(q[:, :, None], keys, values, used[:, None, None], scale)[:, :, 0])


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


class ReferenceLayer:
    """See `protocols.LayerKernels`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return _rms_norm(residual, weight, eps)

    def rope_write(
        self, qkv: Tensor, rope: Tensor, slots: Tensor, kv: Tensor, norms: tuple[Tensor, Tensor, float] | None
    ) -> Tensor:
        kv_heads, block_size, head_dim = kv.shape[2:]
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        q_heads = heads.shape[1] - 2 * kv_heads
        q, k, v = heads[:, :q_heads], heads[:, q_heads : q_heads + kv_heads], heads[:, q_heads + kv_heads :]
        q, k = q.float(), k.float()
        if norms is not None:
            q_weight, k_weight, eps = norms
            q, k = _rms_norm(q, q_weight, eps), _rms_norm(k, k_weight, eps)
        block, offset = slots // block_size, slots % block_size
        kv[block, 0, :, offset] = _rotate(k, rope).to(kv.dtype)
        kv[block, 1, :, offset] = v
        return _rotate(q, rope).to(qkv.dtype).contiguous()

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (functional.silu(gate) * up).to(gate_up.dtype)

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None, *, float32_out: bool = False, int8: bool = False
    ) -> PackedLinear:
        if int8:
            return Int8Linear(weight, bias, float32_out)

        def linear(x: Tensor) -> Tensor:
            y = functional.linear(x, weight, bias)
            return y.float() if float32_out else y

        return linear


def _rotate(x: Tensor, rope: Tensor) -> Tensor:
    cosine, sine = rope[:, None, 0], rope[:, None, 1]  # [tokens, 1, head_dim / 2]
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cosine - b * sine, b * cosine + a * sine), dim=-1)


class ReferenceSampling:
    """See `protocols.SamplingKernels`; the whole vocabulary is drawn on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def gumbel(self, seed: int, position: int, token_ids: Tensor | None, vocab_size: int) -> Tensor:
        if token_ids is None:
            token_ids = torch.arange(vocab_size, device=self._device)
        return noise.gumbel(seed, position, token_ids)
