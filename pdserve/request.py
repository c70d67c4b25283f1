"""What a request asks for, and the one rule that says when a sample is over.

Owns the sampling parameters and the stop rule that workers and the core both apply; owns no state.
Invariant: `finish_reason` is a pure function, so a worker that stops early and the core that ends always agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn, for all samples of a request. Sample i uses `seed + i` (modulo 2**64)."""

    max_tokens: int  # generated tokens per sample, at least 1
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    seed: int = 0  # 64 bits, unsigned
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output (Keskar et al., 2019)
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int = -1  # alternatives reported per token; -1 is none at all, 0 is the sampled token's own
    min_tokens: int = 0
    ignore_eos: bool = False
    eos_token_ids: tuple[int, ...] = ()  # of the model
    stop_token_ids: tuple[int, ...] = ()  # of the client

    def banned_until_min(self) -> tuple[int, ...]:
        """Ids that may not be sampled before `min_tokens` tokens exist."""
        return self.eos_token_ids + self.stop_token_ids

    def finish_reason(self, token: int, num_generated: int) -> FinishReason | None:
        """Whether a sample ends with `token`, its `num_generated`-th; stop strings are the front end's."""
        if token in self.stop_token_ids or (token in self.eos_token_ids and not self.ignore_eos):
            return "stop"
        return "length" if num_generated >= self.max_tokens else None


def blocks_at_end(sampling: Sampling, num_prompt: int, num_tokens: int, block_size: int) -> int:
    """KV blocks a request needs alone at its end; `num_tokens` are there already: the prompt, and what was generated.

    Full blocks are shared, the rest is each sample's own; the last token of a sample is never computed.
    """
    num_shared = num_tokens // block_size
    longest = max(num_prompt + sampling.max_tokens - 1, num_tokens)
    return num_shared + sampling.n * (-(-longest // block_size) - num_shared)
