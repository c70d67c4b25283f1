"""Which pair of workers is chosen."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from coordinator.router import Candidate, Demand, LeastLoad, PowerOfTwo, PrefixAware, RoundRobin, policy


def worker(epoch: str, **changes: Any) -> Candidate:
    fields = {
        "cached_tokens": 0,
        "queued_tokens": 0,
        "num_samples": 0,
        "used_share": 0.0,
        "prefill_rate": 1000.0,
        "sample_s": 0.001,
    }
    return Candidate(epoch=epoch, **(fields | changes))


def demand(num_tokens: int = 1000, **changes: Any) -> Demand:
    fields = {"num_samples": 1, "token_bytes": 1000, "chunk_tokens": 512, "link_bytes_per_s": 1e9}
    return Demand(num_tokens=num_tokens, **(fields | changes))


def chosen(policy, prefills, decodes=(), **changes) -> tuple[str, str]:
    prefill, decode = policy.choose(demand(**changes), prefills, list(decodes))
    return (prefill.epoch if prefill else "", decode.epoch if decode else "")


def test_round_robin_takes_turns():
    policy = RoundRobin()
    workers = [worker("a"), worker("b")]
    assert [chosen(policy, workers)[0] for _ in range(4)] in (["a", "b", "a", "b"], ["b", "a", "b", "a"])


def test_least_load_takes_the_shortest_queue_and_the_fewest_samples():
    prefills = [worker("a", queued_tokens=10), worker("b", queued_tokens=5)]
    decodes = [worker("c", num_samples=1), worker("d", num_samples=2)]
    assert chosen(LeastLoad(Random(0)), prefills, decodes) == ("b", "c")


def test_a_faster_worker_with_a_longer_queue_may_be_sooner():
    prefills = [worker("slow", queued_tokens=10, prefill_rate=10), worker("fast", queued_tokens=100)]
    assert chosen(LeastLoad(Random(0)), prefills)[0] == "fast"


def test_power_of_two_never_takes_the_worst_of_three():
    workers = [worker("a"), worker("b", queued_tokens=10), worker("c", queued_tokens=20)]
    policy = PowerOfTwo(Random(1))
    assert "c" not in {chosen(policy, workers)[0] for _ in range(50)}


def test_a_cached_prefix_attracts():
    assert chosen(PrefixAware(Random(0)), [worker("a"), worker("b", cached_tokens=900)])[0] == "b"


def test_a_backlog_outweighs_a_cached_prefix():
    prefills = [worker("idle"), worker("warm", cached_tokens=900, queued_tokens=1000)]
    assert chosen(PrefixAware(Random(0)), prefills)[0] == "idle"


def test_cache_credit_fades_with_the_backlog_above_the_least():
    """One second behind, 1,500 cached tokens of 2,000 are worth half: 1 s + 1.25 s against 2 s."""
    prefills = [worker("idle"), worker("warm", cached_tokens=1500, queued_tokens=1000)]
    assert chosen(PrefixAware(Random(0)), prefills, num_tokens=2000)[0] == "idle"
    both_late = [worker("a", queued_tokens=1000), worker("warm", cached_tokens=1500, queued_tokens=1000)]
    assert chosen(PrefixAware(Random(0)), both_late, num_tokens=2000)[0] == "warm"


def test_a_decode_worker_that_holds_the_prefix_has_less_to_read():
    decodes = [worker("a"), worker("b", cached_tokens=900)]
    assert chosen(PrefixAware(Random(0)), [worker("p")], decodes) == ("p", "b")


def test_a_crowded_decode_worker_costs_its_streams_more():
    decodes = [worker("a", num_samples=8), worker("b", num_samples=1)]
    assert chosen(PrefixAware(Random(0)), [worker("p")], decodes) == ("p", "b")


def test_without_a_prefill_side_the_decode_worker_s_own_prefill_counts():
    decodes = [worker("a", queued_tokens=500), worker("b")]
    assert chosen(PrefixAware(Random(0)), [], decodes) == ("", "b")


def test_ties_are_broken_by_seeded_dice():
    workers = [worker("a"), worker("b")]

    def draws(seed: int) -> list[str]:
        policy = PrefixAware(Random(seed))
        return [chosen(policy, workers)[0] for _ in range(100)]

    assert draws(7) == draws(7)
    assert min(Counter(draws(7)).values()) > 25


@pytest.mark.parametrize("name", ["round_robin", "least_load", "power_of_two", "prefix_aware"])
def test_every_policy_takes_one_of_each_side_that_has_any(name):
    assert chosen(policy(name, 0), [worker("p")], [worker("d")]) == ("p", "d")
    assert chosen(policy(name, 0), [worker("p")], []) == ("p", "")
    assert chosen(policy(name, 0), [], [worker("d")]) == ("", "d")
