"""How a token is drawn, step by step, and that nothing but its own row decides it."""

import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pd_kernels import select
from pdserve.model.sampling import LOWEST_LOGPROB, SampleRow, sample
from pdserve.model.truncation import threshold
from pdserve.request import Sampling
from pdserve.worker.sampling import seed_of

NOISE = select("cpu", "float32", 64, "reference").sampling
INF = math.inf


def row(seed=0, position=10, prompt=(), output=(), at=0, **params):
    sampling = Sampling(max_tokens=8, **{"temperature": 0.0, **params})
    return SampleRow(sampling=sampling, seed=seed, prompt=prompt, output=output, position=position, row=at)


def draw(logits, *rows):
    return [drawn.token for drawn in sample(torch.tensor(logits, dtype=torch.float32), rows, NOISE)]


def noise(seed, position, vocab):
    return NOISE.gumbel(seed, position, None, vocab).tolist()


def test_greedy_takes_the_largest_logit():
    assert draw([[0.0, 3.0, 2.0]], row()) == [1]


def test_the_lowest_id_wins_a_tie():
    assert draw([[1.0, 3.0, 3.0, 3.0]], row()) == [1]
    assert draw([[0.0] * 5000], row()) == [0]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_p": 0.0}, {"top_k": 1}])
def test_three_ways_to_be_greedy(params):
    logits = [[1.0, 1.1, 1.0, 1.1]]
    assert {draw(logits, row(seed=seed, **{"temperature": 2.0, **params}))[0] for seed in range(40)} == {1}


@pytest.mark.parametrize("temperature", [1e-4, 1e-10, 1e-300, 5e-324])
def test_tiny_temperatures_are_greedy_and_do_not_overflow(temperature):
    assert draw([[50.0, 49.9, -3e38]], row(temperature=temperature)) == [0]


def test_repetition_penalty_divides_what_is_positive_and_multiplies_what_is_negative():
    logits = [[3.0, 2.0, -1.0, -1.5]]
    assert draw(logits, row(prompt=(0,), repetition_penalty=2.0)) == [1]
    assert draw([[-1.0, -1.5]], row(output=(0,), repetition_penalty=2.0)) == [1]


def test_repetition_penalty_counts_a_token_once_however_often_it_was_seen():
    assert draw([[3.0, 1.0]], row(prompt=(0, 0, 0), output=(0, 0), repetition_penalty=2.0)) == [0]


def test_presence_penalty_is_paid_once_and_frequency_penalty_per_time():
    logits = [[3.0, 2.0, 1.6]]
    assert draw(logits, row(output=(0, 0, 0), presence_penalty=0.9)) == [0]
    assert draw(logits, row(output=(0, 0, 0), frequency_penalty=0.4)) == [1]
    assert draw(logits, row(output=(0, 0, 1), presence_penalty=1.5)) == [2]


def test_presence_and_frequency_penalties_spare_the_prompt():
    assert draw([[3.0, 2.0]], row(prompt=(0, 0, 0), presence_penalty=2.0, frequency_penalty=2.0)) == [0]


def test_logit_bias_is_added_after_the_penalties():
    assert draw([[4.0, 1.0]], row(prompt=(0,), repetition_penalty=2.0, logit_bias=((0, -0.9),))) == [0]
    assert draw([[4.0, 1.0]], row(prompt=(0,), repetition_penalty=2.0, logit_bias=((0, -1.1),))) == [1]


def test_end_and_stop_tokens_cannot_be_drawn_before_min_tokens_whatever_their_bias():
    params = {"min_tokens": 2, "eos_token_ids": (0,), "stop_token_ids": (1,), "logit_bias": ((0, 100.0), (1, 90.0))}
    logits = [[0.0, 0.0, 1.0]]
    assert [draw(logits, row(output=(2,) * count, **params))[0] for count in (0, 1, 2)] == [2, 2, 0]
    assert draw(logits, row(temperature=2.0, top_p=0.5, **params)) == [2]


def test_a_ban_holds_when_end_tokens_are_ignored_too():
    assert draw([[1.0, 0.0]], row(min_tokens=1, eos_token_ids=(0,), ignore_eos=True)) == [1]


def test_if_every_token_is_banned_the_lowest_id_comes():
    assert draw([[1.0, 0.0]], row(temperature=1.0, min_tokens=1, eos_token_ids=(0, 1))) == [0]


def test_the_draw_is_gumbel_max_over_scaled_logits():
    logits = [0.3, 0.1, -0.2, 0.05]
    for position in range(20):
        scores = [(value - 0.3) / 0.7 + g for value, g in zip(logits, noise(5, position, 4), strict=True)]
        assert draw([logits], row(seed=5, position=position, temperature=0.7)) == [scores.index(max(scores))]


def test_draws_follow_the_softmax():
    logits = [2.0, 1.0, 0.0, -1.0]
    total = sum(math.exp(value) for value in logits)
    counts = Counter(draw([logits], row(seed=9, position=p, temperature=1.0))[0] for p in range(3000))
    for token, value in enumerate(logits):
        share = math.exp(value) / total
        assert abs(counts[token] / 3000 - share) < 4 * math.sqrt(share * (1 - share) / 3000)


def test_seed_and_position_decide_and_nothing_else_does():
    logits = [[0.0] * 50]
    first = draw(logits, row(seed=1, position=3, temperature=1.0))
    assert draw(logits, row(seed=1, position=3, temperature=1.0, prompt=(4, 5), output=(6,))) == first
    others = {draw(logits, row(seed=s, position=p, temperature=1.0))[0] for s, p in ((2, 3), (1, 4), (2**64 - 1, 3))}
    assert others != set(first)


def test_a_row_draws_the_same_alone_and_among_others():
    chance = random.Random(1)
    logits = [[chance.gauss(0, 3) for _ in range(60)] for _ in range(6)]
    kinds = (
        {"temperature": 1.0},
        {"temperature": 0.0},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 0.9, "top_k": 7, "min_p": 0.01},
        {"temperature": 1.0, "repetition_penalty": 1.5, "presence_penalty": 0.5, "num_logprobs": 2},
        {"temperature": 0.0, "logit_bias": ((3, 20.0),)},
    )
    rows = [row(seed=i, prompt=(1, 2), output=(3, 3), at=i, **kind) for i, kind in enumerate(kinds)]
    alone = [draw([logits[i]], row(seed=i, prompt=(1, 2), output=(3, 3), **kind))[0] for i, kind in enumerate(kinds)]
    assert draw(logits, *rows) == alone
    assert draw(logits, *rows[::-1]) == alone[::-1]


def test_several_samples_may_draw_from_one_row():
    rows = [row(seed=seed, at=1, temperature=1.0) for seed in range(8)]
    drawn = draw([[9.0, 0.0], [0.0, 0.0]], *rows)
    assert set(drawn) == {0, 1}


def test_logits_are_left_as_they_were():
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    params = {"repetition_penalty": 2.0, "logit_bias": ((0, 5.0),), "min_tokens": 1, "eos_token_ids": (2,)}
    sample(logits, [row(prompt=(1,), **params), row(temperature=1.0)], NOISE)
    assert logits.tolist() == [[1.0, 2.0, 3.0]]


def kept(values, **params):
    scaled = torch.tensor(values, dtype=torch.float32)
    limit = threshold(scaled, Sampling(max_tokens=1, **params))
    return [i for i, value in enumerate(scaled.tolist()) if limit is None or value >= limit]


def log(*shares):
    return [math.log(share / max(shares)) for share in shares]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 4}, [0, 1, 2, 3]),
        ({"top_k": 100}, [0, 1, 2, 3]),
        ({"top_p": 0.49}, [0]),
        ({"top_p": 0.51}, [0, 1]),
        ({"top_p": 0.81}, [0, 1, 2]),
        ({"top_p": 0.99}, [0, 1, 2, 3]),
        ({"top_p": 1e-9}, [0]),
        ({"min_p": 0.59}, [0, 1]),
        ({"min_p": 0.61}, [0]),
        ({"min_p": 1.0}, [0]),
        ({"top_k": 2, "top_p": 0.62}, [0]),  # 0.5 of the 0.8 that two tokens hold is 0.625
        ({"top_k": 2, "top_p": 0.63}, [0, 1]),
        ({"top_k": 3, "min_p": 0.59}, [0, 1]),
    ],
)
def test_who_survives_truncation(params, expected):
    assert kept(log(0.5, 0.3, 0.15, 0.05), **params) == expected


def test_whoever_equals_the_threshold_survives():
    assert kept([0.0, -1.0, -1.0, -2.0], top_k=2) == [0, 1, 2]
    assert kept([-1.0, 0.0, -1.0, -1.0, -9.0], top_p=0.6) == [0, 1, 2, 3]
    assert kept([0.0, 0.0, 0.0], top_p=0.1) == [0, 1, 2]


def survivors(values, top_k, top_p, min_p):
    """The rule of `threshold` in the plainest words, over exact-enough floats."""
    ordered = sorted(values, reverse=True)
    limit = ordered[top_k - 1] if 0 < top_k < len(values) else -INF
    if top_p < 1.0:
        pool = [value for value in ordered if value >= limit]
        total, mass = math.fsum(map(math.exp, pool)), 0.0
        for value in pool:
            mass += math.exp(value)
            if mass >= top_p * total * (1 - 1e-7):
                limit = value
                break
    least = math.log(min_p) - 1e-6 if min_p else -INF
    return [i for i, value in enumerate(values) if value >= limit and value >= least]


@given(
    st.lists(st.integers(-40, 0), min_size=1, max_size=30),
    st.integers(0, 12),
    st.sampled_from([0.05, 0.33, 0.71, 0.9, 0.97, 1.0]),
    st.sampled_from([0.0, 0.003, 0.11, 0.6]),
)
def test_truncation_equals_its_plain_words(eighths, top_k, top_p, min_p):
    values = [(value - max(eighths)) / 8 for value in eighths]
    assert kept(values, top_k=top_k, top_p=top_p, min_p=min_p) == survivors(values, top_k, top_p, min_p)


def test_a_truncated_draw_is_the_best_score_among_the_survivors():
    chance = random.Random(3)
    for position in range(25):
        values = [-chance.randrange(0, 30) / 8 for _ in range(40)] + [0.0]
        alive = survivors(values, 0, 0.8, 0.0)
        scores = noise(2, position, 41)
        best = max(alive, key=lambda i: (torch.tensor(values[i]) + torch.tensor(scores[i])).item())
        assert draw([values], row(seed=2, position=position, temperature=1.0, top_p=0.8)) == [best]


def test_draws_are_the_same_on_every_machine():
    logits = [[(7 * token % 32) / 8 for token in range(64)]]
    drawn = [draw(logits, row(seed=1234567890123, position=p, temperature=1.0, top_p=0.9))[0] for p in range(12)]
    assert drawn == [26, 54, 36, 27, 54, 63, 45, 27, 4, 26, 62, 63]


def reports(logits, *rows):
    return sample(torch.tensor(logits, dtype=torch.float32), rows, NOISE)


def test_no_logprobs_are_reported_unless_asked_for():
    (drawn,) = reports([[1.0, 0.0]], row())
    assert (drawn.logprob, drawn.top) == (None, ())


def test_the_drawn_tokens_own_logprob_comes_with_no_alternatives():
    (drawn,) = reports([[math.log(3), 0.0]], row(num_logprobs=0))
    assert drawn.logprob == pytest.approx(math.log(0.75)) and drawn.top == ()


def test_logprobs_are_those_of_the_raw_logits():
    params = {"temperature": 0.5, "top_k": 2, "repetition_penalty": 3.0, "logit_bias": ((0, -100.0),)}
    (drawn,) = reports([[math.log(2), math.log(1), math.log(1)]], row(prompt=(0,), num_logprobs=1, **params))
    assert drawn.token != 0 and drawn.logprob == pytest.approx(math.log(0.25))
    assert drawn.top == ((0, pytest.approx(math.log(0.5))),)


def test_alternatives_are_ranked_and_ties_go_by_id():
    (drawn,) = reports([[0.0, 2.0, 1.0, 2.0]], row(num_logprobs=3))
    assert [token for token, _ in drawn.top] == [1, 3, 2]
    assert drawn.top[0][1] == drawn.logprob


def test_each_row_gets_as_many_alternatives_as_it_asked_for():
    rows = [row(num_logprobs=n) for n in (-1, 0, 2, 99)]
    assert [len(drawn.top) for drawn in reports([[0.0, 1.0, 2.0]], *rows)] == [0, 0, 2, 3]


@pytest.mark.parametrize("logits", [[-INF, 0.0, -3e38], [math.nan, 0.0, 1.0], [math.nan] * 3])
def test_logprobs_are_finite_whatever_the_logits(logits):
    for params in ({}, {"temperature": 1.0, "top_p": 0.5}, {"temperature": 1.0}):
        (drawn,) = reports([logits], row(num_logprobs=3, **params))
        assert all(LOWEST_LOGPROB <= value <= 0.0 for _, value in drawn.top)
        assert LOWEST_LOGPROB <= drawn.logprob <= 0.0


def test_nothing_is_drawn_for_nobody():
    assert sample(torch.zeros(0, 4), [], NOISE) == []


def test_alternatives_at_a_tie_do_not_depend_on_what_others_asked_for():
    logits = [[0.0, 5.0, 5.0, 5.0]] * 2
    alone = reports(logits, row(num_logprobs=1))[0]
    among = reports(logits, row(num_logprobs=1), row(num_logprobs=4, at=1))[0]
    assert alone == among and [token for token, _ in alone.top] == [1]


def test_each_sample_has_its_own_seed():
    sampling = Sampling(max_tokens=2, n=2, seed=2**64 - 1)
    assert [seed_of(sampling, sample) for sample in range(2)] == [2**64 - 1, 0]
