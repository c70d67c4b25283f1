"""The nouns of prefill scheduling: what is asked, what runs in a step, and the limits.

Owns no state and no decision. Invariant: the chunks of a prompt follow each other without gap or overlap, and every
chunk but the last ends at a block boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pdserve.messages import Key

Policy = Literal["fcfs", "lpm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    token_budget: int = 2048  # most tokens per step, over all chunks
    chunk_tokens: int = 512  # most tokens per chunk
    policy: Policy = "fcfs"  # lpm: longest cached prefix first
    max_overtakes: int = 16  # how often a waiting prompt may be passed
    lease_ttl_s: float = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Tokens to compute: a prompt, and what was generated before if a stream is resumed."""

    key: Key
    tokens: Sequence[int]
    extras: bytes = b""  # of `pdserve.prefix.seed_extras`: model fingerprint, cache salt
    priority: int = 0  # lower is sooner
    has_reader: bool = True  # False: nobody reads the KV (one token asked for), so it is not leased


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens [start, start + len(tokens)) of a prompt, and the blocks of everything up to their end."""

    key: Key
    start: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    is_first: bool
    is_last: bool

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)
