"""From sampling parameters to rows for the runner, and from what was drawn to a message; for both roles."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.messages import Key, TokenOut
from pdserve.model.sampling import Sampled, SampleRow
from pdserve.prefix import seed_extras
from pdserve.request import Sampling

SEEDS = 2**64


def seed_of(sampling: Sampling, sample: int) -> int:
    return (sampling.seed + sample) % SEEDS


def sample_rows(sampling: Sampling, tokens: Sequence[int], num_prompt: int) -> tuple[SampleRow, ...]:
    """One row per sample, drawn after all of `tokens`, of which the first `num_prompt` are the prompt."""
    prompt, output = tokens[:num_prompt], tokens[num_prompt:]
    return tuple(
        SampleRow(sampling=sampling, seed=seed_of(sampling, sample), prompt=prompt, output=output, position=len(tokens))
        for sample in range(sampling.n)
    )


def token_out(key: Key, sample: int, position: int, sampled: Sampled) -> TokenOut:
    return TokenOut(
        key=key,
        sample=sample,
        position=position,
        token=sampled.token,
        logprob=sampled.logprob,
        top=sampled.top,
    )


def extras_of(model: str, salt: str) -> bytes:
    """What beside tokens decides whether KV may be shared."""
    return seed_extras(model=model, cache_salt=salt or None)
