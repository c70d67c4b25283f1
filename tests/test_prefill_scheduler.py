"""The prefill scheduler: order, chunks, blocks and leases, without a device or a clock."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.blocks import BlockPool
from pdserve.messages import Key
from prefill_node.plan import PrefillConfig, Prompt
from prefill_node.scheduler import PrefillScheduler


def key(name):
    return Key(request=name, attempt=1)


def scheduler_with(num_blocks=65, block_size=16, **config):
    return PrefillScheduler(BlockPool(num_blocks, block_size), PrefillConfig(**config))


def prompt(name, tokens, **fields):
    return Prompt(key=key(name), tokens=list(range(tokens)) if isinstance(tokens, int) else tokens, **fields)


def own(name, num_tokens):
    """A prompt that shares nothing with the others."""
    return prompt(name, [ord(name[0]) * 1000 + ord(name[-1])] * num_tokens)


def step(scheduler, now_s=0.0):
    """Plan and complete one step; returns the chunks as (name, start, num_tokens)."""
    chunks = scheduler.plan(now_s)
    for chunk in chunks:
        assert scheduler.completed(chunk, now_s)
    scheduler.check()
    return [(chunk.key.request, chunk.start, chunk.num_tokens) for chunk in chunks]


def drive(scheduler):
    steps = []
    while chunks := step(scheduler):
        steps.append(chunks)
    return steps


def nothing_leaked(scheduler):
    counts = scheduler.pool.counts()
    assert (counts.held, counts.landing, counts.draining) == (0, 0, 0)
    assert scheduler.held() == [] and scheduler.num_waiting == scheduler.num_running == 0
    scheduler.check()


def test_a_long_prompt_runs_in_chunks_and_ends_with_a_lease():
    scheduler = scheduler_with(chunk_tokens=64, token_budget=64)
    scheduler.add(prompt("r", 150))
    assert drive(scheduler) == [[("r", 0, 64)], [("r", 64, 64)], [("r", 128, 22)]]
    assert scheduler.leased() == [key("r")]
    scheduler.release(key("r"))
    nothing_leaked(scheduler)


def test_a_step_never_exceeds_its_token_budget_and_chunks_end_at_block_boundaries():
    scheduler = scheduler_with(chunk_tokens=64, token_budget=100)
    for name in "abc":
        scheduler.add(own(name, 70))
    steps = drive(scheduler)
    assert all(sum(size for _, _, size in chunks) <= 100 for chunks in steps)
    assert steps[0] == [("a", 0, 64), ("b", 0, 32)]


def test_a_step_fills_up_with_several_short_prompts():
    scheduler = scheduler_with(token_budget=100)
    for name in "abc":
        scheduler.add(own(name, 20))
    assert step(scheduler) == [("a", 0, 20), ("b", 0, 20), ("c", 0, 20)]


def test_tokens_are_publishable_only_after_their_step_completed():
    scheduler = scheduler_with(chunk_tokens=64, token_budget=64)
    scheduler.add(prompt("r", 100))
    (chunk,) = scheduler.plan(0.0)
    assert scheduler.publishable(key("r")) == 0
    scheduler.completed(chunk, 0.0)
    assert scheduler.publishable(key("r")) == 64
    step(scheduler)
    assert scheduler.publishable(key("r")) == 100 and len(scheduler.table(key("r"))) == 7


def test_blocks_are_cached_only_after_their_step_completed():
    scheduler = scheduler_with()
    scheduler.add(prompt("r", 40))
    (chunk,) = scheduler.plan(0.0)
    assert scheduler.pool.take_events().stored == ()
    scheduler.completed(chunk, 0.0)
    assert len(scheduler.pool.take_events().stored) == 2


def test_cached_leading_blocks_are_publishable_as_soon_as_the_prompt_is_admitted():
    scheduler = scheduler_with()
    scheduler.add(prompt("r", 64))
    step(scheduler)
    scheduler.add(prompt("s", 100))
    (chunk,) = scheduler.plan(0.0)
    assert scheduler.publishable(key("s")) == 64 and chunk.start == 64
    assert scheduler.table(key("s"))[:4] == scheduler.table(key("r"))[:4]


@pytest.mark.parametrize(
    ("length", "cached"), [(1, 0), (15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32), (48, 32)]
)
def test_a_repeated_prompt_computes_at_least_one_token(length, cached):
    scheduler = scheduler_with()
    for name in ("first", "second", "third"):
        scheduler.add(prompt(name, length, has_reader=False))
        (chunk,) = scheduler.plan(0.0)
        assert chunk.start == scheduler.cached_tokens(key(name)) == (0 if name == "first" else cached)
        scheduler.completed(chunk, 0.0)
    nothing_leaked(scheduler)


def test_prompts_with_another_salt_share_nothing():
    scheduler = scheduler_with()
    scheduler.add(prompt("a", 64, extras=b"a"))
    step(scheduler)
    scheduler.add(prompt("b", 64, extras=b"b"))
    assert step(scheduler) == [("b", 0, 64)]


def test_without_a_reader_the_blocks_are_free_at_once():
    scheduler = scheduler_with()
    scheduler.add(prompt("r", 40, has_reader=False))
    step(scheduler)
    assert scheduler.is_gone(key("r")) and scheduler.publishable(key("r")) == 0
    nothing_leaked(scheduler)


def test_a_prompt_that_can_never_fit_is_refused_and_blocks_nobody():
    scheduler = scheduler_with(num_blocks=65)
    assert not scheduler.add(prompt("huge", 1200))
    assert not scheduler.add(prompt("empty", 0))
    assert scheduler.add(own("s", 10))
    assert step(scheduler) == [("s", 0, 10)]


def test_a_prompt_that_does_not_fit_now_waits_for_a_lease_to_end():
    scheduler = scheduler_with(num_blocks=9)
    scheduler.add(own("a", 80))
    step(scheduler)
    scheduler.add(own("b", 80))
    assert step(scheduler) == [] and scheduler.num_waiting == 1
    scheduler.release(key("a"))
    assert step(scheduler) == [("b", 0, 80)]


def test_small_prompts_pass_a_big_one_only_a_bounded_number_of_times():
    scheduler = scheduler_with(num_blocks=65, max_overtakes=5)
    scheduler.add(own("held", 16 * 30))
    step(scheduler)
    scheduler.add(own("big", 16 * 40))
    passed = 0
    for number in range(20):
        scheduler.add(prompt(f"s{number}", [number] * 20, has_reader=False))
        passed += len(step(scheduler))
    assert passed == 5
    scheduler.release(key("held"))
    assert step(scheduler)[0][0] == "big"


def test_lpm_takes_the_longest_cached_prefix_first():
    scheduler = scheduler_with(policy="lpm", token_budget=16, chunk_tokens=16)
    scheduler.add(prompt("warm", 48, has_reader=False))
    drive(scheduler)
    scheduler.add(own("cold", 16))
    scheduler.add(prompt("hit", 64))
    assert step(scheduler) == [("hit", 48, 16)]


def test_lpm_does_not_starve_a_cold_prompt():
    scheduler = scheduler_with(policy="lpm", token_budget=16, chunk_tokens=16, max_overtakes=3)
    scheduler.add(prompt("warm", 32, has_reader=False))
    drive(scheduler)
    scheduler.add(own("cold", 16))
    order = []
    for number in range(6):
        scheduler.add(prompt(f"hit{number}", list(range(32)) + [number], has_reader=False))
        order += [name for name, _, _ in step(scheduler)]
    assert order.index("cold") == 3


def test_a_lower_priority_number_is_sooner():
    scheduler = scheduler_with(token_budget=16, chunk_tokens=16)
    scheduler.add(own("later", 16))
    scheduler.add(prompt("sooner", [5] * 16, priority=-1))
    assert step(scheduler) == [("sooner", 0, 16)]


def test_two_prompts_with_the_same_prefix_compute_it_once():
    scheduler = scheduler_with(chunk_tokens=32, token_budget=256)
    scheduler.add(prompt("a", list(range(64)) + [1]))
    scheduler.add(prompt("b", list(range(64)) + [2]))
    steps = drive(scheduler)
    assert steps == [[("a", 0, 32)], [("a", 32, 32)], [("a", 64, 1), ("b", 64, 1)]]


def test_when_the_computing_prompt_is_aborted_the_oldest_waiter_takes_over():
    scheduler = scheduler_with(chunk_tokens=32, token_budget=256)
    for name in "abc":
        scheduler.add(prompt(name, list(range(64)) + [ord(name)]))
    step(scheduler)
    scheduler.abort(key("a"))
    assert step(scheduler) == [("b", 32, 32)]
    assert step(scheduler) == [("b", 64, 1), ("c", 64, 1)]


@pytest.mark.parametrize("when", range(4))
def test_an_abort_between_the_launch_of_a_chunk_and_its_result_returns_every_block(when):
    scheduler = scheduler_with(chunk_tokens=64, token_budget=64)
    for round_number in range(50):
        before = scheduler.pool.counts()
        scheduler.add(prompt("r", [round_number] * 256))
        for _ in range(when):
            step(scheduler)
        (chunk,) = scheduler.plan(0.0)
        scheduler.abort(key("r"))
        assert scheduler.pool.counts().draining > 0 and not scheduler.is_gone(key("r"))
        assert not scheduler.completed(chunk, 0.0)
        assert not scheduler.completed(chunk, 0.0)
        after = scheduler.pool.counts()
        assert after.free + after.cached == before.free + before.cached
        assert scheduler.is_gone(key("r"))
        nothing_leaked(scheduler)


def test_an_aborted_chunk_is_not_in_the_cache():
    scheduler = scheduler_with()
    scheduler.add(prompt("r", 64))
    (chunk,) = scheduler.plan(0.0)
    scheduler.abort(key("r"))
    scheduler.completed(chunk, 0.0)
    scheduler.add(prompt("s", 65))
    assert step(scheduler) == [("s", 0, 65)]


def test_abort_is_harmless_in_every_state():
    scheduler = scheduler_with(num_blocks=9, chunk_tokens=16, token_budget=16)
    scheduler.add(own("leased", 16))
    step(scheduler)
    scheduler.add(own("running", 48))
    step(scheduler)
    scheduler.add(own("queued", 120))
    for name in ("leased", "running", "queued", "unknown") * 2:
        scheduler.abort(key(name))
    nothing_leaked(scheduler)


def test_a_reader_that_wants_nothing_any_more_leaves_no_lease():
    scheduler = scheduler_with(chunk_tokens=16, token_budget=16)
    scheduler.add(prompt("r", 20))
    step(scheduler)
    scheduler.release(key("r"))
    step(scheduler)
    nothing_leaked(scheduler)


def test_an_expired_lease_keeps_its_blocks_until_a_newcomer_needs_them():
    scheduler = scheduler_with(num_blocks=9, lease_ttl_s=20.0)
    scheduler.add(own("a", 80))
    step(scheduler, now_s=0.0)
    assert step(scheduler, now_s=19.0) == [] and scheduler.leases.num_expired == 0
    step(scheduler, now_s=21.0)
    assert scheduler.leases.num_expired == 1 and scheduler.publishable(key("a")) == 80
    scheduler.add(own("b", 80))
    assert step(scheduler, now_s=22.0) == [("b", 0, 80)]
    assert scheduler.publishable(key("a")) == 0
    step(scheduler, now_s=23.0)
    assert scheduler.is_gone(key("a"))


def test_a_renewed_lease_does_not_expire_and_lost_ones_are_named():
    scheduler = scheduler_with(lease_ttl_s=20.0)
    scheduler.add(own("a", 80))
    step(scheduler, now_s=0.0)
    scheduler.add(own("b", 40))
    assert scheduler.renew([key("a"), key("b"), key("gone")], now_s=15.0) == [key("gone")]
    scheduler.plan(30.0)
    assert scheduler.leases.num_expired == 0


def test_a_duplicate_add_is_ignored():
    scheduler = scheduler_with()
    assert scheduler.add(prompt("r", 40)) and scheduler.add(prompt("r", 40))
    assert step(scheduler) == [("r", 0, 40)]
    assert scheduler.add(prompt("r", 40)) and step(scheduler) == []


def test_planning_ahead_of_a_result_never_runs_a_chunk_twice():
    scheduler = scheduler_with(chunk_tokens=16, token_budget=16)
    scheduler.add(own("a", 32))
    first = scheduler.plan(0.0)
    scheduler.add(own("b", 16))
    second = scheduler.plan(0.0)
    assert [chunk.key.request for chunk in first + second] == ["a", "b"]


@settings(max_examples=60, deadline=None, database=None)
@given(seed=st.integers(0, 2**32), policy=st.sampled_from(["fcfs", "lpm"]))
def test_whatever_is_aborted_every_other_prompt_is_computed_once_and_nothing_leaks(seed, policy):
    rng, now_s = random.Random(seed), 0.0
    scheduler = scheduler_with(num_blocks=20, block_size=4, chunk_tokens=8, token_budget=16, policy=policy)
    expected, done, in_flight = {}, {}, []
    for number in range(400):
        now_s += 0.1
        action = rng.random()
        name = f"r{rng.randrange(max(1, len(expected)))}"
        if action < 0.3 and number < 300:
            name = f"r{len(expected)}"
            expected[name] = rng.randrange(1, 50)
            base = rng.randrange(3)
            assert scheduler.add(prompt(name, [base] * (expected[name] - 1) + [number]))
        elif action < 0.4:
            scheduler.abort(key(name))
        elif action < 0.7 or number >= 300:
            in_flight += scheduler.plan(now_s)
        rng.shuffle(in_flight)
        for chunk in [in_flight.pop() for _ in range(min(len(in_flight), rng.randrange(3)))]:
            if scheduler.completed(chunk, now_s):
                name = chunk.key.request
                start = done.setdefault(name, chunk.start)
                assert start == chunk.start
                done[name] += chunk.num_tokens
        for leased in scheduler.leased():
            assert done[leased.request] == expected[leased.request]
            if rng.random() < 0.5:
                scheduler.release(leased)
        scheduler.check()
    for _ in range(200):
        for chunk in in_flight + scheduler.plan(now_s):
            scheduler.completed(chunk, now_s)
        in_flight = []
        for leased in scheduler.leased():
            scheduler.release(leased)
    nothing_leaked(scheduler)
