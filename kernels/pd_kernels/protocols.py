"""What a kernel set must provide: the boundary between the model and the code that computes.

Owns the shapes and the meaning of every kernel; owns no implementation. The prefill and the decode side are
separate protocols because they are tuned for different machines (compute bound, memory bound).
Invariant: every kernel ignores cache rows past a sequence's length, whatever they hold, NaN included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillBatch:
    """Chunks of several prompts, flat: request r owns query rows [query_start[r], query_start[r + 1])."""

    query_start: Tensor  # int32 [requests + 1]
    context_lens: Tensor  # int32 [requests]: tokens in the cache after this chunk, the chunk included
    block_tables: Tensor  # int32 [requests, max_blocks]: entries past the context are ignored
    max_query: int  # the longest chunk, in tokens
    max_context: int  # the longest context, in tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBatch:
    """One query row per sequence; row r is the last token of a context of context_lens[r] tokens."""

    context_lens: Tensor  # int32 [sequences], the query's own token included
    block_tables: Tensor  # int32 [sequences, max_blocks]
    max_context: int


class PrefillAttention(Protocol):
    def __call__(self, q: Tensor, kv: Tensor, batch: PrefillBatch, scale: float, out: Tensor) -> None:
        """Causal attention of `q` [tokens, q_heads, head_dim] over the paged cache of one layer, into `out`.

        `kv` is a strided view [num_blocks, 2, kv_heads, block_size, head_dim]; index 0 of dim 1 holds keys, 1 values.
        The chunk's own keys and values are already written. `out` is [tokens, q_heads, head_dim], contiguous.
        """


class DecodeAttention(Protocol):
    def __call__(self, q: Tensor, kv: Tensor, batch: DecodeBatch, scale: float, out: Tensor) -> None:
        """Attention of one query row per sequence, `q` [sequences, q_heads, head_dim]; the rest as for prefill."""


PackedLinear = Callable[[Tensor], Tensor]
"""x [rows, in_features] -> [rows, out_features] in x's dtype, or in float32 where it was packed so."""


class LayerKernels(Protocol):
    """What surrounds attention in a decoder layer."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[rows, hidden] -> [rows, hidden]; statistics in float32 (Zhang and Sennrich, 2019)."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x in place, then the norm of residual."""

    def rope_write(
        self, qkv: Tensor, rope: Tensor, slots: Tensor, kv: Tensor, norms: tuple[Tensor, Tensor, float] | None
    ) -> Tensor:
        """Rotate queries and keys, write keys and values into their cache slots, return the queries.

        `qkv` [tokens, (q_heads + 2 * kv_heads) * head_dim]; `rope` float32 [tokens, 2, head_dim / 2]: cosines and
        sines per token, half-split rotation as in Llama (Su et al., 2021); `slots` int64 [tokens]: block * block_size +
        offset; `kv` as in attention. `norms` = (q weight, k weight, eps) of Qwen3's per-head RMSNorm before the
        rotation. Returns [tokens, q_heads, head_dim], contiguous.
        """

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[rows, 2 * inner] -> silu(first half) * second half, [rows, inner]."""

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None, *, float32_out: bool = False, int8: bool = False
    ) -> PackedLinear:
        """Take `weight` [out_features, in_features] into whatever layout is fastest; the caller then drops its own.

        With `float32_out` (lm_head) sums leave in float32, not rounded to the dtype of x, and are valid until the next
        call. With `int8` the weight is kept as integers and one scale per output channel (`pd_kernels.int8`): half the
        bytes of bfloat16; x stays in its dtype.
        """


class SamplingKernels(Protocol):
    def gumbel(self, seed: int, position: int, token_ids: Tensor | None, vocab_size: int) -> Tensor:
        """Float32 Gumbel noise for `token_ids` (int64 [k]), or for all of [0, vocab_size) when None.

        Philox4x32-10 (Salmon et al., 2011), key = the 64-bit seed, counter = (token id, 0, position low, position
        high); the value of an id never depends on which other ids are drawn. The same bits on every machine and device.
        """


class LayerParts(Protocol):
    """One decoder layer's weights, packed by the same set that fuses them."""

    @property
    def input_norm(self) -> Tensor: ...
    @property
    def qkv(self) -> PackedLinear: ...
    @property
    def qk_norms(self) -> tuple[Tensor, Tensor, float] | None: ...
    @property
    def output(self) -> PackedLinear: ...
    @property
    def post_norm(self) -> Tensor: ...
    @property
    def gate_up(self) -> PackedLinear: ...
    @property
    def down(self) -> PackedLinear: ...


class StepRows(Protocol):
    """What a step says of its rows: decode rows first, then the prefill chunks."""

    @property
    def slots(self) -> Tensor: ...
    @property
    def num_decode(self) -> int: ...
    @property
    def decode(self) -> DecodeBatch | None: ...
    @property
    def prefill(self) -> PrefillBatch | None: ...
    @property
    def sampled(self) -> Tensor | None:
        """int64, ascending; None: every row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """What all layers share."""

    hidden: int
    inner: int
    q_heads: int
    head_dim: int
    scale: float  # of attention
    eps: float  # of the norms
    final_norm: Tensor


class FusedLayers(Protocol):
    """All layers of a decoder at once."""

    def __call__(self, residual: Tensor, rope: Tensor, step: StepRows, kv: Tensor) -> Tensor | None:
        """Embeddings [rows, hidden] (overwritten) -> the final norm of the sampled rows, valid until the next call.

        `rope` as in `rope_write`; `kv` [num_blocks, layers, 2, kv_heads, block_size, head_dim]. With no row sampled
        only the cache is written. None: this step cannot run so, and nothing was done.
        """


Fuse = Callable[[Sequence[LayerParts], DecoderShape], FusedLayers | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSet:
    name: str  # reference, cpu, triton
    why: str  # one line for the log and `pdserve doctor`
    prefill: PrefillAttention
    decode: DecodeAttention
    layer: LayerKernels
    sampling: SamplingKernels
    fuse: Fuse | None = None  # None: layers run kernel by kernel
