"""Prompts made of real text: lists of token ids of exact lengths, the same for the same seed.

Owns where the text comes from (the documentation inside Python) and how it is cut. Invariant: no two prompts of a call
begin with the same `DISTINCT` tokens, so no prompt finds another's blocks in a prefix cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pydoc_data.topics import topics

Encode = Callable[[str], Sequence[int]]

DISTINCT = 16  # tokens: the smallest block that is served


def token_stream(encode: Encode, seed: int) -> list[int]:
    """All the text there is, about 150,000 tokens, its articles in an order drawn from `seed`."""
    articles = [topics[name] for name in sorted(topics)]
    random.Random(seed).shuffle(articles)
    return [token for article in articles for token in encode(article)]


def cut(stream: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """One prompt per length, each from its own stretch of `stream`; raises ValueError when it is too short."""
    seen: set[tuple[int, ...]] = set()
    prompts = []
    at = 0
    for length in lengths:
        while (start := tuple(stream[at : at + DISTINCT])) in seen:
            at += 1
        if at + length > len(stream):
            raise ValueError(f"{sum(lengths)} tokens of text wanted, {len(stream)} are there")
        seen.add(start)
        prompts.append(list(stream[at : at + length]))
        at += max(length, DISTINCT)
    return prompts


def random_prompts(lengths: Sequence[int], vocab: range, seed: int) -> list[list[int]]:
    """For models that know no language: ids drawn uniformly from `vocab`."""
    draw = random.Random(seed)
    return [[draw.choice(vocab) for _ in range(length)] for length in lengths]
