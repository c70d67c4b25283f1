"""Which pair of workers takes a request.

Owns the policies and the predicted cost of a choice; whether something fits was decided before. A policy gets the
candidates of each side, either of which may be empty (no hand-off, or nothing to decode), and picks one of each.
Invariant: the choice depends only on the arguments, the policy's own counter and its seeded dice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol, TypeVar

_T = TypeVar("_T")

CREDIT_HALF_LIFE_S = 1.0  # of backlog above the least: then a cached token counts half
PENALTY_STEPS = 16  # decode steps for which a newcomer's cost to its batch mates is counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is to be placed."""

    num_tokens: int
    num_samples: int
    token_bytes: int
    chunk_tokens: int
    link_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A worker with room, as it stands with everything already promised on it."""

    epoch: str
    cached_tokens: int  # leading tokens of this request that it holds
    queued_tokens: int  # prompt tokens it was given and has not computed
    num_samples: int
    used_share: float  # of its blocks
    prefill_rate: float  # tokens per second
    sample_s: float  # seconds one more sample adds to a step

    @property
    def backlog_s(self) -> float:
        return self.queued_tokens / self.prefill_rate


Pair = tuple[Candidate | None, Candidate | None]


class Policy(Protocol):
    def choose(self, demand: Demand, prefills: Sequence[Candidate], decodes: Sequence[Candidate]) -> Pair:
        """One of each side that has any."""


def _least(items: Sequence[_T], cost: Callable[[_T], float], dice: Random) -> _T | None:
    if not items:
        return None
    costs = [cost(item) for item in items]
    least = min(costs)
    return dice.choice([item for item, its in zip(items, costs, strict=True) if its <= least + 1e-9])


def _decode_load(candidate: Candidate) -> float:
    return candidate.num_samples + candidate.used_share + candidate.backlog_s


class RoundRobin:
    def __init__(self) -> None:
        self._turn = 0

    def choose(self, demand: Demand, prefills: Sequence[Candidate], decodes: Sequence[Candidate]) -> Pair:
        self._turn += 1
        return self._next(prefills), self._next(decodes)

    def _next(self, candidates: Sequence[Candidate]) -> Candidate | None:
        return candidates[self._turn % len(candidates)] if candidates else None


class LeastLoad:
    def __init__(self, dice: Random) -> None:
        self._dice = dice

    def choose(self, demand: Demand, prefills: Sequence[Candidate], decodes: Sequence[Candidate]) -> Pair:
        return (
            _least(prefills, lambda each: each.backlog_s, self._dice),
            _least(decodes, _decode_load, self._dice),
        )


class PowerOfTwo:
    """The better of two random ones (Mitzenmacher, 2001)."""

    def __init__(self, dice: Random) -> None:
        self._dice = dice
        self._least_load = LeastLoad(dice)

    def choose(self, demand: Demand, prefills: Sequence[Candidate], decodes: Sequence[Candidate]) -> Pair:
        return self._least_load.choose(demand, self._two(prefills), self._two(decodes))

    def _two(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        return candidates if len(candidates) <= 2 else self._dice.sample(candidates, 2)


class PrefixAware:
    """Least predicted seconds until the first decoded token, with what the newcomer costs those who decode already."""

    def __init__(self, dice: Random) -> None:
        self._dice = dice

    def choose(self, demand: Demand, prefills: Sequence[Candidate], decodes: Sequence[Candidate]) -> Pair:
        pairs = [(p, d) for p in prefills or (None,) for d in decodes or (None,)]
        idle_s = min((each.backlog_s for each in prefills or decodes), default=0.0)
        return _least(pairs, lambda pair: pair_cost_s(demand, pair, idle_s), self._dice) or (None, None)


def prefill_s(demand: Demand, worker: Candidate, idle_s: float) -> float:
    """Until the prompt is computed; cache credit fades with the worker's backlog above the least, `idle_s`."""
    credit: float = worker.cached_tokens * 0.5 ** ((worker.backlog_s - idle_s) / CREDIT_HALF_LIFE_S)
    return worker.backlog_s + max(1.0, demand.num_tokens - credit) / worker.prefill_rate


def pair_cost_s(demand: Demand, pair: Pair, idle_s: float) -> float:
    prefill, decode = pair
    seconds = 0.0
    computing = prefill or decode
    if computing:
        seconds += prefill_s(demand, computing, idle_s)
    if prefill and decode:
        tail_tokens = min(demand.chunk_tokens, demand.num_tokens - min(decode.cached_tokens, demand.num_tokens))
        seconds += tail_tokens * demand.token_bytes / demand.link_bytes_per_s
    if decode:
        seconds += PENALTY_STEPS * demand.num_samples * decode.sample_s * (1 + decode.num_samples)
        seconds += decode.backlog_s if prefill else 0.0
    return seconds


def policy(name: str, seed: int) -> Policy:
    dice = Random(seed)
    if name == "round_robin":
        return RoundRobin()
    if name == "least_load":
        return LeastLoad(dice)
    if name == "power_of_two":
        return PowerOfTwo(dice)
    assert name == "prefix_aware", name
    return PrefixAware(dice)
