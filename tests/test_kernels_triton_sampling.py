"""Noise, searches, truncation and draws on a GPU: the same bits and the same survivors as the sampler's, row by row."""

import math
import random

import pytest
import torch

from pd_kernels import noise, select
from pd_kernels.triton.sampling import (
    LogitEdits,
    TritonSampling,
    apply_penalties,
    draw,
    greedy,
    likeliest,
    logprobs,
    scale,
    thresholds,
)
from pdserve.model.sampling import SampleRow, _edit, _likeliest, is_greedy, sample
from pdserve.model.truncation import threshold
from pdserve.request import Sampling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NOISE = TritonSampling(DEVICE)
REFERENCE = select("cpu", "float32", 64, "reference").sampling
INF = math.inf

each = pytest.mark.parametrize
SEEDS = [(0, 0), (1, 1), (42, 7), (2**64 - 1, 2**40 + 3), (2**63 + 5, 2**33 + 1), (0xDEADBEEF, 2**31), (2**32, 2**32)]


def bits(x):
    return x.cpu().view(torch.int32)


def on(values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def logits_of(rows, vocab, seed=0, steps=None):
    """Random rows; with `steps`, rounded to that many per unit, so that many values are equal."""
    values = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    return (values if steps is None else (values * steps).round() / steps).to(DEVICE)


@each(("seed", "position"), SEEDS)
def test_the_noise_of_a_whole_vocabulary_has_the_written_bits(seed, position):
    expected = noise.gumbel(seed, position, torch.arange(10_007))
    assert torch.equal(bits(NOISE.gumbel(seed, position, None, 10_007)), bits(expected))


@each("count", [0, 1, 3, 17, 2000])
@each(("seed", "position"), SEEDS[2:5])
def test_the_noise_of_an_id_does_not_depend_on_what_else_is_drawn(seed, position, count):
    ids = torch.randperm(2**18, generator=torch.Generator().manual_seed(0))[:count]
    ids[:1] = 2**31 + 7
    drawn = NOISE.gumbel(seed, position, ids.to(DEVICE), 2**18)
    assert torch.equal(bits(drawn), bits(noise.gumbel(seed, position, ids)))


@each("shape", [(1, 1), (3, 7), (17, 100), (2, 4096), (3, 9001)], ids=str)
def test_greedy_takes_the_lowest_id_among_the_largest(shape):
    for steps in (None, 1):
        values = logits_of(*shape, steps=steps)
        assert greedy(values).tolist() == values.cpu().numpy().argmax(-1).tolist()


def test_greedy_knows_one_zero_and_rows_of_nothing():
    assert greedy(on([[-1.0, -0.0, 0.0], [-INF, -INF, -INF], [-INF, -3e38, -INF]])).tolist() == [1, 0, 1]
    assert greedy(logits_of(0, 5)).tolist() == []


@each("n", [0, 1, 2, 5, 20])
@each("vocab", [3, 100, 9001])
def test_the_likeliest_are_those_of_the_sampler(vocab, n):
    values = logits_of(3, vocab, steps=4)
    values[1, :-2] = -INF
    expected = [_likeliest(row.cpu(), n).tolist() for row in values]
    assert likeliest(values, n).tolist() == expected


def test_logprobs_are_those_of_the_log_softmax():
    logits = logits_of(3, 5000)
    tokens = on([7, 4999, 0], torch.int64)
    own, ids, top = logprobs(logits, tokens, 20)
    expected = logits.double().log_softmax(-1)
    torch.testing.assert_close(own.double(), expected.gather(1, tokens[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(top.double(), expected.topk(20).values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(expected.gather(1, ids), expected.topk(20).values)


SETTINGS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10**6},
    {"top_p": 1e-9},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.999999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.8},
    {"top_k": 3, "top_p": 0.99, "min_p": 0.3},
    {"top_p": 0.95, "min_p": 1e-6},
    {},
]


def limits_of(settings):
    columns = (("top_k", 0, torch.int64), ("top_p", 1.0, torch.float64), ("min_p", 0.0, torch.float64))
    return {name: on([setting.get(name, none) for setting in settings], dtype) for name, none, dtype in columns}


def survivors(scaled, setting):
    limit = threshold(scaled.cpu(), Sampling(max_tokens=1, **setting))
    return torch.ones(scaled.shape[0], dtype=torch.bool) if limit is None else scaled.cpu() >= limit


@each("vocab", [5, 1000, 5003])
@each("steps", [None, 8, 1])
@each("temperature", [0.2, 1.0, 3.0])
def test_the_survivors_of_truncation_are_those_of_the_sampler(vocab, steps, temperature):
    scaled = scale(logits_of(len(SETTINGS), vocab, steps=steps), on([temperature] * len(SETTINGS)))
    limits = thresholds(scaled, **limits_of(SETTINGS))
    kept = (scaled >= limits[:, None]).cpu()
    for index, setting in enumerate(SETTINGS):
        assert torch.equal(kept[index], survivors(scaled[index], setting)), setting


@each("row", [[0.0] * 8, [0.0, -INF, -INF], [0.0, -1e-42, -1e-38], [0.0, -3e38, -INF], [0.0, -0.0, -1.0]], ids=str)
@each("setting", [{"top_k": 2}, {"top_p": 0.5}, {"top_p": 0.51}, {"top_k": 2, "top_p": 0.2}], ids=str)
def test_truncation_of_odd_rows_is_the_samplers(row, setting):
    scaled = on([row])
    given = {name: value for name, value in limits_of([setting]).items() if name in setting}
    assert torch.equal((scaled >= thresholds(scaled, **given)[:, None]).cpu()[0], survivors(scaled[0], setting))


def test_without_settings_nothing_is_cut():
    assert thresholds(logits_of(3, 100)).tolist() == [-INF] * 3
    assert thresholds(logits_of(0, 100)).tolist() == []


def edits_of(rows):
    """One entry per distinct token of prompt, output, bias and ban."""
    starts, entries = [0], []
    for row in rows:
        sampling, found = row.sampling, {}
        for token in row.prompt:
            found[token] = [0, 0.0]
        for token in row.output:
            entry = found.setdefault(token, [0, 0.0])
            entry[0] += 1
        for token, bias in sampling.logit_bias:
            found.setdefault(token, [-1, 0.0])[1] = bias
        if len(row.output) < sampling.min_tokens:
            for token in sampling.banned_until_min():
                found.setdefault(token, [-1, 0.0])[1] = -INF
        entries += [(token, *entry) for token, entry in found.items()]
        starts.append(len(entries))
    return LogitEdits(
        starts=on(starts, torch.int64),
        ids=on([token for token, _, _ in entries], torch.int64),
        counts=on([count for _, count, _ in entries], torch.int32),
        biases=on([bias for _, _, bias in entries]),
        repetition=on([row.sampling.repetition_penalty for row in rows]),
        presence=on([row.sampling.presence_penalty for row in rows], torch.float64),
        frequency=on([row.sampling.frequency_penalty for row in rows], torch.float64),
    )


def rows_of(vocab, count, seed=0):
    """Rows of all kinds: greedy and warm, truncated, penalised, biased, banned."""
    chance, rows = random.Random(seed), []
    for index in range(count):
        params = {"temperature": chance.choice([0.0, 0.3, 0.7, 1.0, 2.0])}
        params |= chance.choice(SETTINGS)
        if index % 2:
            params |= {"repetition_penalty": chance.uniform(0.7, 1.7), "presence_penalty": chance.uniform(-1, 1)}
        if index % 3:
            params |= {"frequency_penalty": chance.uniform(-1, 1), "logit_bias": ((3, 2.3), (4, -7.1))}
        if index % 5 == 0:
            params |= {"min_tokens": 100, "eos_token_ids": (1,), "stop_token_ids": (3,)}
        prompt, output = ([chance.randrange(vocab) for _ in range(length)] for length in (3000, chance.randrange(60)))
        sampling = Sampling(max_tokens=200, **params)
        seed = chance.randrange(2**64)
        rows.append(SampleRow(sampling=sampling, seed=seed, prompt=prompt, output=output, position=index, row=index))
    return rows


@each("vocab", [50, 5000])
def test_penalties_bias_and_ban_give_the_samplers_bits(vocab):
    logits, rows = logits_of(12, vocab), rows_of(vocab, 12)
    expected = logits.cpu().clone()
    for values, row in zip(expected, rows, strict=True):
        _edit(values, row)
    apply_penalties(logits, edits_of(rows))
    assert torch.equal(logits.cpu(), expected)


def test_no_edits_change_nothing():
    logits = logits_of(2, 10)
    rows = [SampleRow(sampling=Sampling(max_tokens=1), seed=0, prompt=(), output=(), position=0)] * 2
    before = logits.clone()
    apply_penalties(logits, edits_of(rows))
    assert torch.equal(logits, before)


@each("vocab", [50, 1000, 4099])
def test_all_rows_at_once_draw_what_the_sampler_draws_one_by_one(vocab):
    rows = rows_of(vocab, 17, seed=vocab)
    logits = logits_of(17, vocab, seed=1)
    expected = [drawn.token for drawn in sample(logits.cpu(), rows, REFERENCE)]
    values = logits.clone()
    apply_penalties(values, edits_of(rows))
    scaled = scale(values, on([row.sampling.temperature for row in rows]))
    settings = [{name: getattr(row.sampling, name) for name in ("top_k", "top_p", "min_p")} for row in rows]
    limits = thresholds(scaled, **limits_of(settings))
    seeds = on([row.seed - 2**64 if row.seed >= 2**63 else row.seed for row in rows], torch.int64)
    warm = draw(scaled, limits, seeds, on([row.position for row in rows], torch.int64))
    cold = on([is_greedy(row.sampling) for row in rows], torch.bool)
    assert torch.where(cold, greedy(values), warm).tolist() == expected


def test_what_cannot_be_searched_is_refused_by_shape():
    with pytest.raises(ValueError, match=r"float16 \(2, 5\)"):
        greedy(logits_of(2, 5).half())
    with pytest.raises(ValueError, match="65"):
        likeliest(logits_of(2, 100), 65)
    with pytest.raises(ValueError, match="float64"):
        thresholds(logits_of(2, 5), top_p=on([0.5, 0.5]))
    with pytest.raises(ValueError, match=r"\(2, 5\)"):
        NOISE.gumbel(0, 0, torch.zeros((2, 5), dtype=torch.int64), 5)
