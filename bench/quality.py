"""What rounding the weights costs: the same text through two engines, position by position.

Owns the comparison of two sets of logits; knows no prompt of a user. Invariant: both engines see the same tokens, so a
difference is the weights' alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from bench.inprocess import BLOCK_SIZE, Engine
from bench.report import Row
from pdserve.model.runner import Work


@dataclass(slots=True)
class Difference:
    """Sums over positions; natural logarithms."""

    positions: int = 0
    agreed: int = 0  # positions whose likeliest token is the same
    divergence: float = 0.0  # KL(full || rounded)
    surprise_full: float = 0.0  # -log p of the text's own next token
    surprise_rounded: float = 0.0

    def add(self, full: torch.Tensor, rounded: torch.Tensor, following: Sequence[int]) -> None:
        """Logits [tokens, vocab] of one text, and the token after each."""
        p, q = full.log_softmax(-1), rounded.log_softmax(-1)
        index = torch.tensor(following)[:, None]
        self.positions += len(following)
        self.agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
        self.divergence += float((p.exp() * (p - q)).sum())
        self.surprise_full -= float(p.gather(1, index).sum())
        self.surprise_rounded -= float(q.gather(1, index).sum())

    def rows(self) -> Iterator[Row]:
        count, about = self.positions, {"positions": self.positions}
        yield Row(name="int8_same_likeliest_token", value=self.agreed / count, unit="of positions", parameters=about)
        yield Row(name="int8_divergence", value=self.divergence / count, unit="nats per token", parameters=about)
        ratio = torch.tensor((self.surprise_rounded - self.surprise_full) / count).exp().item()
        yield Row(name="int8_perplexity_ratio", value=ratio, unit="x", parameters=about)


def compare(full: Engine, rounded: Engine, texts: Sequence[Sequence[int]]) -> Difference:
    """Each text fits the engines' pools by itself."""
    difference = Difference()
    for text in texts:
        blocks = range(1, 2 + len(text) // BLOCK_SIZE)
        work = [Work(tokens=text[:-1], start=0, block_table=blocks)]
        difference.add(full.runner.logits(work), rounded.runner.logits(work), text[1:])
    return difference
