"""How exactness is judged: served tokens beside reference tokens, served log-probabilities beside the reference's.

Pure functions over values; sends nothing, loads nothing. Invariant: a difference is excused only by a closeness that
the reference itself shows at that place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from bench.references import Reference

NEAR_TIE = 1e-3  # a gap below it between the two largest float32 logits excuses a branch


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """The first place where a text leaves its reference; what follows it is another text and is not compared."""

    num_prompt: int  # tokens
    step: int  # generated tokens before it
    wanted: int
    got: int | None  # None: the text ended before
    gap: float
    kind: Literal["mismatch", "near tie"]

    def __str__(self) -> str:
        return (
            f"{self.kind}: prompt of {self.num_prompt}, token {self.step}: {self.got}, not {self.wanted}; "
            f"the reference's gap is {self.gap:.2g}"
        )


def branch(reference: Reference, tokens: Sequence[int], *, near: float = NEAR_TIE) -> Branch | None:
    """None when `tokens` are the reference's; a text of another length branches where the shorter one ends."""
    wanted = reference.tokens
    if tuple(tokens) == wanted:
        return None
    step = next((i for i, pair in enumerate(zip(wanted, tokens, strict=False)) if pair[0] != pair[1]), None)
    if step is None:
        step = min(len(tokens), len(wanted) - 1)
    got = tokens[step] if step < len(tokens) and len(tokens) <= len(wanted) else None
    is_near = got is not None and reference.gaps[step] < near
    return Branch(
        num_prompt=len(reference.prompt),
        step=step,
        wanted=wanted[step],
        got=got,
        gap=reference.gaps[step],
        kind="near tie" if is_near else "mismatch",
    )


def branches(references: Iterable[Reference], texts: Iterable[Sequence[int]]) -> list[Branch]:
    pairs = zip(references, texts, strict=True)
    return [found for reference, tokens in pairs if (found := branch(reference, tokens)) is not None]


def cacheable(lengths: Iterable[int], block_size: int) -> int:
    """Prompt tokens a warm prefix cache can save: whole blocks, never the token whose logits are needed."""
    return sum((length - 1) // block_size * block_size for length in lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One position of a forced text: what was served there beside what the reference says."""

    num_prompt: int
    step: int
    gap: float  # the reference's
    difference: float  # largest, over the tokens that both report
    is_same_choice: bool


def place(reference: Reference, step: int, served: Mapping[str, float], spell: Mapping[int, str]) -> Place:
    """`served` holds log-probabilities by spelling, as completions report them; `spell` the reference's top ids.

    Two ids of one spelling cannot be told apart; neither is then compared. Log-probabilities differ as logits do, less
    the normalizer, which is one number for the whole row. Nothing in common is an infinite difference.
    """
    names = [spell[token] for token in reference.top_ids[step]]
    theirs = {
        name: logprob
        for name, logprob in zip(names, reference.top_logprobs[step], strict=True)
        if names.count(name) == 1 and name in served
    }
    return Place(
        num_prompt=len(reference.prompt),
        step=step,
        gap=reference.gaps[step],
        difference=max((abs(served[name] - logprob) for name, logprob in theirs.items()), default=float("inf")),
        is_same_choice=bool(served) and max(served, key=lambda name: served[name]) == names[0],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Of all forced places together."""

    num_places: int
    largest: float  # difference of any log-probability
    num_other_choices: int
    refused: tuple[Place, ...]  # other choices where the reference's gap is above twice the largest difference


def verdict(places: Sequence[Place]) -> Verdict:
    largest = max((each.difference for each in places), default=0.0)
    other = [each for each in places if not each.is_same_choice]
    return Verdict(
        num_places=len(places),
        largest=largest,
        num_other_choices=len(other),
        refused=tuple(each for each in other if each.gap > 2 * largest),
    )
