"""Drawing tokens: a pure function of logits, parameters, token history, seed and position.

Owns the order: repetition penalty, presence and frequency penalty, logit bias, ban, temperature, truncation, and
Gumbel-max (Gumbel, 1954), where the lowest id wins ties. The kernels own the noise, `truncation` who may be drawn.
Invariant: a row's token depends on nothing but its own logits and its own `SampleRow`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pd_kernels.protocols import SamplingKernels
from pdserve.model.rows import argmax, at_least
from pdserve.model.truncation import threshold
from pdserve.request import Sampling

LOWEST_LOGPROB = -9999.0
_COLDEST = 1e-6  # lower temperatures draw as this one, so that no division overflows


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """One token to draw; several may draw from one row of logits."""

    sampling: Sampling
    seed: int  # of this sample: request seed + sample index, modulo 2**64
    prompt: Sequence[int]
    output: Sequence[int]  # generated so far
    position: int  # of the token drawn, in prompt and output together
    row: int = 0  # of the logits; inside a `Work` the runner sets it


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    token: int
    logprob: float | None = None  # of the raw logits, at least LOWEST_LOGPROB
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens, best first


def sample(logits: Tensor, rows: Sequence[SampleRow], kernels: SamplingKernels) -> list[Sampled]:
    """Draw one token per entry of `rows` from float32 `logits` [any, vocab], which stay as they are."""
    if not rows:
        return []
    tokens = _draw(logits, rows, kernels)
    wanted = [index for index, row in enumerate(rows) if row.sampling.num_logprobs >= 0]
    if not wanted:
        return [Sampled(token=token) for token in tokens]
    reports = _logprobs(logits, [rows[index] for index in wanted], [tokens[index] for index in wanted])
    by_index = dict(zip(wanted, reports, strict=True))
    return [by_index.get(index) or Sampled(token=token) for index, token in enumerate(tokens)]


def is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature == 0.0 or sampling.top_p == 0.0 or sampling.top_k == 1


def _draw(logits: Tensor, rows: Sequence[SampleRow], kernels: SamplingKernels) -> list[int]:
    values = _gather(logits, [row.row for row in rows])
    edited = [index for index, row in enumerate(rows) if _edits(row)]
    if edited and values is logits:
        values = logits.clone()
    for index in edited:
        _edit(values[index], rows[index])
    tokens: list[int] = argmax(values).tolist()
    drawn = [index for index, row in enumerate(rows) if not is_greedy(row.sampling)]
    if drawn:
        winners = torch.stack([_draw_warm(values[index], rows[index], kernels) for index in drawn]).tolist()
        for index, token in zip(drawn, winners, strict=True):
            tokens[index] = token
    return tokens


def _gather(values: Tensor, rows: list[int]) -> Tensor:
    if rows == list(range(values.shape[0])):
        return values
    return values.index_select(0, torch.tensor(rows, device=values.device))


def _draw_warm(values: Tensor, row: SampleRow, kernels: SamplingKernels) -> Tensor:
    """Gumbel-max over the survivors of truncation, of one row [vocab]; noise is drawn for nobody else."""
    peak = values.max().clamp(min=torch.finfo(torch.float32).min)
    scaled = (values - peak) / max(row.sampling.temperature, _COLDEST)
    limit = threshold(scaled, row.sampling)
    if limit is None:
        return argmax(scaled + kernels.gumbel(row.seed, row.position, None, scaled.numel()))
    ids = at_least(scaled, limit)
    if not ids.numel():  # logits that are not numbers compare with nothing
        return argmax(scaled)
    noise = kernels.gumbel(row.seed, row.position, ids, scaled.numel())
    return ids[argmax(scaled[ids] + noise)]


def _edits(row: SampleRow) -> bool:
    sampling = row.sampling
    has_penalty = sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty
    return bool(has_penalty or sampling.logit_bias or len(row.output) < sampling.min_tokens)


def _edit(values: Tensor, row: SampleRow) -> None:
    """Penalties, bias and ban on one row [vocab], in place."""
    sampling = row.sampling

    def ids(tokens: Sequence[int]) -> Tensor:
        return torch.tensor(tokens, dtype=torch.int64, device=values.device)

    if sampling.repetition_penalty != 1.0:
        seen = ids([*row.prompt, *row.output])
        old = values[seen]
        values[seen] = torch.where(old > 0, old / sampling.repetition_penalty, old * sampling.repetition_penalty)
    if (sampling.presence_penalty or sampling.frequency_penalty) and len(row.output):
        counts = Counter(row.output)
        costs = [sampling.presence_penalty + sampling.frequency_penalty * count for count in counts.values()]
        values[ids(list(counts))] -= torch.tensor(costs, dtype=torch.float32, device=values.device)
    if sampling.logit_bias:
        tokens, biases = zip(*sampling.logit_bias, strict=True)
        values[ids(tokens)] += torch.tensor(biases, dtype=torch.float32, device=values.device)
    if len(row.output) < sampling.min_tokens:
        values[ids(sampling.banned_until_min())] = -math.inf


def _logprobs(logits: Tensor, rows: Sequence[SampleRow], tokens: Sequence[int]) -> list[Sampled]:
    """The drawn tokens with their log-probabilities under the raw logits, and the likeliest alternatives."""
    values = _gather(logits, [row.row for row in rows])
    mass = values.logsumexp(dim=-1, keepdim=True)
    own = _finite(values.gather(1, torch.tensor(tokens, device=logits.device)[:, None]) - mass)
    reports = []
    for index, row in enumerate(rows):
        ids = _likeliest(values[index], row.sampling.num_logprobs)
        (best,) = _finite((values[index][ids] - mass[index])[None])
        top = tuple(zip(ids.tolist(), best, strict=True))
        reports.append(Sampled(token=tokens[index], logprob=own[index][0], top=top))
    return reports


def _likeliest(values: Tensor, count: int) -> Tensor:
    """int64 [count]: ids of the largest of [vocab], best first; among equals the lowest ids."""
    limit = values.topk(min(count, values.numel())).values[-1:]
    if not limit.numel():
        return torch.empty(0, dtype=torch.int64, device=values.device)
    ids = at_least(values, limit)
    return ids[values[ids].argsort(descending=True, stable=True)][:count]


def _finite(logprobs: Tensor) -> list[list[float]]:
    values: list[list[float]] = logprobs.nan_to_num(nan=LOWEST_LOGPROB).clamp(LOWEST_LOGPROB, 0.0).tolist()
    return values
