"""Noise, searches, truncation, penalties and draws on the GPU: the bits, survivors and tokens of the sampler.

Owns rows of every kind of request; the sampler of `pdserve.model` is the truth. Invariant: noise and penalties are
compared bit for bit with the CPU; what depends on the device's own exp is compared with the sampler on that device.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu.cases import judge
from bench.gpu.section import Setting, Sink
from bench.report import Check
from pd_kernels import noise
from pd_kernels.reference import ReferenceSampling
from pd_kernels.triton import sampling as kernels
from pdserve.model.sampling import Sampled, SampleRow, is_greedy, sample
from pdserve.model.truncation import threshold
from pdserve.request import Sampling

WORDS = ((0, 0), (42, 7), (2**64 - 1, 2**40 + 3), (2**63 + 5, 2**33 + 1), (0xDEADBEEF, 2**31), (2**32, 2**32))
SETTINGS: tuple[dict[str, Any], ...] = (
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10**6},
    {"top_p": 1e-9},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.95},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.8},
    {"top_k": 3, "top_p": 0.99, "min_p": 0.3},
    {},
)
_COLUMNS = (("top_k", 0, torch.int64), ("top_p", 1.0, torch.float64), ("min_p", 0.0, torch.float64))


def run(setting: Setting, sink: Sink) -> None:
    vocab = 1000 if setting.is_dry else 128_256
    for seed, position in WORDS:
        sink.attempt("gumbel", setting, partial(_gumbel, setting, sink, seed, position, vocab))
    for size in (1000,) if setting.is_dry else (50, 32_000, vocab, 262_144):
        for steps in (0, 4):
            about = (size, steps)
            sink.attempt(f"searches {about}", setting, partial(_searches, setting, sink, size, steps))
            sink.attempt(f"thresholds {about}", setting, partial(_thresholds, setting, sink, size, steps))
        sink.attempt(f"penalties {size}", setting, partial(_penalties, setting, sink, size))
        sink.attempt(f"draws {size}", setting, partial(_draws, setting, sink, size))


def _gumbel(setting: Setting, sink: Sink, seed: int, position: int, vocab: int) -> None:
    """The whole vocabulary, and ids of which some need all 32 bits."""
    ours, name = kernels.TritonSampling(setting.device), f"gumbel {seed:#x} {position:#x}"
    wanted = noise.gumbel(seed, position, torch.arange(vocab))
    sink.holds(f"{name} has the written bits", _same(ours.gumbel(seed, position, None, vocab), wanted))
    ids = torch.tensor([2**31 + 7, 2**32 - 1, 0, vocab - 1, 2**31])
    drawn = ours.gumbel(seed, position, ids.to(setting.device), vocab)
    sink.holds(f"{name} of large ids", _same(drawn, noise.gumbel(seed, position, ids)))
    theirs = ReferenceSampling(torch.device(setting.device)).gumbel(seed, position, None, vocab)
    sink.holds(f"{name} of the reference on this device", _same(theirs, wanted))


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.cpu().view(torch.int32), b.cpu().view(torch.int32))


def _logits(setting: Setting, rows: int, vocab: int, steps: int) -> Tensor:
    """With `steps`, rounded to that many per unit, so that many values are equal."""
    generator = torch.Generator(setting.device).manual_seed(setting.seed + vocab + steps)
    values = 3 * torch.randn((rows, vocab), generator=generator, device=setting.device)
    return (values * steps).round() / steps if steps else values


def _searches(setting: Setting, sink: Sink, vocab: int, steps: int) -> None:
    rows, about = 3 if setting.is_dry else 64, f"{vocab} {'with ties' if steps else 'distinct'}"
    values = _logits(setting, rows, vocab, steps)
    values[1, : vocab // 2] = -math.inf
    values[2] = -math.inf
    order = values.cpu().sort(dim=-1, descending=True, stable=True).indices  # among equals the lowest id first
    sink.holds(f"greedy {about}", torch.equal(kernels.greedy(values).cpu(), order[:, 0]))
    for n in (1, 5, 20):
        sink.holds(f"likeliest {n} of {about}", torch.equal(kernels.likeliest(values, n).cpu(), order[:, :n]))
    tokens = torch.arange(rows, device=setting.device)
    own, _, top = kernels.logprobs(_logits(setting, rows, vocab, steps), tokens, 20)
    exact = _logits(setting, rows, vocab, steps).double().log_softmax(-1)
    judge(sink, f"logprobs {about}", own, exact.gather(1, tokens[:, None])[:, 0], 1e-5)
    judge(sink, f"top logprobs {about}", top, exact.topk(20).values, 1e-5)


def _limits(setting: Setting, settings: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    return {
        name: torch.tensor([each.get(name, none) for each in settings], dtype=dtype, device=setting.device)
        for name, none, dtype in _COLUMNS
    }


def _thresholds(setting: Setting, sink: Sink, vocab: int, steps: int) -> None:
    """Survivors that differ from the sampler's: none, whichever way the masses were summed."""
    for temperature in (0.25, 1.0, 2.0):
        heat = torch.full((len(SETTINGS),), temperature, device=setting.device)
        scaled = kernels.scale(_logits(setting, len(SETTINGS), vocab, steps), heat)
        kept = scaled >= kernels.thresholds(scaled, **_limits(setting, SETTINGS))[:, None]
        wrong = []
        for row, has, values in zip(SETTINGS, kept, scaled, strict=True):
            limit = threshold(values, Sampling(max_tokens=1, **row))
            wanted = torch.ones_like(has) if limit is None else values >= limit
            if not torch.equal(has, wanted):
                wrong.append(f"{row}: {int((has != wanted).sum())} of {int(wanted.sum())}")
        name = f"thresholds {vocab} {'with ties' if steps else 'distinct'} at {temperature}"
        sink.holds(name, not wrong, "; ".join(wrong))


def rows_of(vocab: int, count: int, seed: int) -> list[SampleRow]:
    """Greedy and warm, truncated, penalised, biased, banned."""
    chance, rows = random.Random(seed), []
    for index in range(count):
        fields: dict[str, Any] = {"temperature": chance.choice((0.0, 0.5, 0.7, 1.0, 2.0)), **chance.choice(SETTINGS)}
        if index % 2:
            fields |= {"repetition_penalty": chance.uniform(0.7, 1.7), "presence_penalty": chance.uniform(-1, 1)}
        if index % 3:
            fields |= {"frequency_penalty": chance.uniform(-1, 1), "logit_bias": ((3, 2.3), (4, -7.1))}
        if index % 5 == 0:
            fields |= {"min_tokens": 100, "eos_token_ids": (1,), "stop_token_ids": (3,)}
        prompt, output = ([chance.randrange(vocab) for _ in range(n)] for n in (3000, chance.randrange(60)))
        rows.append(
            SampleRow(
                sampling=Sampling(max_tokens=200, **fields),
                seed=chance.randrange(2**64),
                prompt=prompt,
                output=output,
                position=chance.randrange(2**34),
                row=index,
            )
        )
    return rows


def edits_of(rows: Sequence[SampleRow], device: str) -> kernels.LogitEdits:
    """One entry per distinct token of prompt, output, bias and ban."""
    starts, entries = [0], []
    for row in rows:
        found: dict[int, list[float]] = {token: [0, 0.0] for token in row.prompt}
        for token in row.output:
            found.setdefault(token, [0, 0.0])[0] += 1
        for token, bias in row.sampling.logit_bias:
            found.setdefault(token, [-1, 0.0])[1] = bias
        if len(row.output) < row.sampling.min_tokens:
            for token in row.sampling.banned_until_min():
                found.setdefault(token, [-1, 0.0])[1] = -math.inf
        entries += [(token, *entry) for token, entry in found.items()]
        starts.append(len(entries))

    def on(values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return kernels.LogitEdits(
        starts=on(starts, torch.int64),
        ids=on([entry[0] for entry in entries], torch.int64),
        counts=on([entry[1] for entry in entries], torch.int32),
        biases=on([entry[2] for entry in entries], torch.float32),
        repetition=on([row.sampling.repetition_penalty for row in rows], torch.float32),
        presence=on([row.sampling.presence_penalty for row in rows], torch.float64),
        frequency=on([row.sampling.frequency_penalty for row in rows], torch.float64),
    )


def _penalties(setting: Setting, sink: Sink, vocab: int) -> None:
    from pdserve.model.sampling import _edit

    rows = rows_of(vocab, 4 if setting.is_dry else 24, setting.seed + vocab)
    logits = _logits(setting, len(rows), vocab, 0)
    wanted = logits.cpu()
    for values, row in zip(wanted, rows, strict=True):
        _edit(values, row)
    kernels.apply_penalties(logits, edits_of(rows, setting.device))
    num_wrong = int((logits.cpu() != wanted).sum())
    sink.holds(f"penalties {vocab} have the sampler's bits", num_wrong == 0, f"{num_wrong} logits differ")


def _draws(setting: Setting, sink: Sink, vocab: int) -> None:
    """All rows at once against one by one; torch divides by a number and by a tensor differently, so a tie may turn."""
    rows = rows_of(vocab, 6 if setting.is_dry else 128, setting.seed + 1)
    logits = _logits(setting, len(rows), vocab, 1)[:, torch.randperm(vocab, device=setting.device)]
    logits = logits.contiguous() + _logits(setting, len(rows), vocab, 0)
    theirs: list[Sampled] = sample(logits, rows, ReferenceSampling(torch.device(setting.device)))
    kernels.apply_penalties(logits, edits_of(rows, setting.device))
    heat = torch.tensor([row.sampling.temperature for row in rows], device=setting.device)
    scaled = kernels.scale(logits, heat)
    asked = [{name: getattr(row.sampling, name) for name, _, _ in _COLUMNS} for row in rows]
    limits = kernels.thresholds(scaled, **_limits(setting, asked))
    seeds = torch.tensor([row.seed - 2**64 * (row.seed >= 2**63) for row in rows], device=setting.device)
    places = torch.tensor([row.position for row in rows], device=setting.device)
    is_cold = torch.tensor([is_greedy(row.sampling) for row in rows], device=setting.device)
    ours = torch.where(is_cold, kernels.greedy(logits), kernels.draw(scaled, limits, seeds, places)).tolist()
    wrong = [index for index, drawn in enumerate(theirs) if drawn.token != ours[index]]
    most = len(rows) // 100
    about = "; ".join(f"row {i}: {ours[i]}, not {theirs[i].token}, {rows[i].sampling}" for i in wrong[:2])
    name = f"draws {vocab} that differ"
    sink.check(Check(name=name, value=len(wrong), bound=f"<= {most}", is_ok=len(wrong) <= most, reason=about[:600]))
