"""The nouns of decode scheduling: what is asked, what runs in a step, and the limits.

Owns no state and no decision. Invariant: a step has at most one query row per decoding sample and at most one chunk
per prompt or resumed sample, and together they keep to `max_batched_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.messages import Key
from pdserve.request import Sampling

if TYPE_CHECKING:
    from decode_node.samples import Sample

COMMON = -1  # in place of a sample's index: the tokens that all samples of a request share


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    max_running: int = 64  # samples that decode or are computed again at a time; others wait in order
    max_batched_tokens: int = 2048  # most tokens per step: decodes first, chunks with what is left
    chunk_tokens: int = 512  # most tokens per chunk
    landing_share: float = 0.25  # of the pool, for reads that have not landed; a single one may exceed it
    max_overtakes: int = 16  # how often a waiting local prompt may be passed
    drain_grace_s: float = 0.05  # how long blocks of a landing that yielded are awaited before others must yield


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRequest:
    """A placement: tokens that land or are prefilled here, and how to go on from them."""

    key: Key
    tokens: Sequence[int]  # prompt, then what was generated before (a resumed stream; then sampling.n is 1)
    num_prompt: int
    sampling: Sampling
    extras: bytes = b""  # of `pdserve.prefix.seed_extras`: model fingerprint, cache salt
    priority: int = 0  # lower is sooner


@dataclass(frozen=True, slots=True, kw_only=True)
class LandingPlan:
    """Read tokens [first_position, num_tokens) into `blocks`, whose entry i holds tokens from i * block_size on."""

    key: Key
    first_position: int  # the tokens before it are cached here and pinned; equal to num_tokens: nothing to read
    num_tokens: int
    blocks: tuple[int, ...]  # at most one more than the tokens need, for growth


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens [start, start + len(tokens)) of a local prompt (`sample` is COMMON) or of a sample computed again."""

    key: Key
    sample: int
    start: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]  # of everything up to the chunk's end
    is_first: bool
    draw: tuple[int, ...]  # samples to draw a token for from the last row; empty unless the chunk is the last

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """One step. Execute `copies` first, in order, then everything else at once."""

    copies: tuple[tuple[int, int], ...]  # (source block, destination block)
    decodes: tuple[Sample, ...]  # each: its last token at position len(tokens) - 1, drawing the one after
    chunks: tuple[Chunk, ...]
    yielded: tuple[Key, ...]  # landings given up: stop the read, call quiescent(key), report Failure(yielded)
    preempted: tuple[tuple[Key, int], ...]  # (key, sample or COMMON): will be computed again here; for counting

    @property
    def is_empty(self) -> bool:
        """Nothing to do. A sample that joined and then found no block to decode into leaves a copy and no decode."""
        return not self.copies and not self.decodes and not self.chunks

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(chunk.num_tokens for chunk in self.chunks)
