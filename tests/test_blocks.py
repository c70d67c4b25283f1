"""Who holds which block: every state, every way back, and no way to own a block twice."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.blocks import BlockPool
from pdserve.prefix import block_digests, seed_extras

EXTRAS = seed_extras(model="m")
SIZE = 4


@pytest.fixture
def recycled():
    return []


@pytest.fixture
def pool(recycled):
    pool = BlockPool(13, SIZE, recycled.append)  # 12 usable
    yield pool
    pool.check()


def prompt(name: int, num_blocks: int):
    tokens = [name] * (num_blocks * SIZE)
    return block_digests(tokens, SIZE, EXTRAS), tokens


def compute(pool, holder, name, num_blocks):
    """Admit a prompt of full blocks, compute it, cache it; returns how many blocks were cached already."""
    digests, tokens = prompt(name, num_blocks)
    cached = pool.admit(holder, digests, tokens, num_blocks)
    for at, block in enumerate(pool.table(holder)):
        pool.cache(block, digests[at], tokens[at * SIZE : (at + 1) * SIZE])
    return cached


def test_the_null_block_is_never_given_out(pool):
    assert pool.admit("all", [], [], 12) == 0
    assert 0 not in pool.table("all")
    assert pool.admit("more", [], [], 1) is None


def test_released_blocks_with_a_digest_stay_cached_and_others_are_free(pool):
    compute(pool, "r", 1, 3)
    pool.grow("r", 2)
    pool.release("r")
    counts = pool.counts()
    assert (counts.cached, counts.free, counts.held) == (3, 9, 0)


def test_a_cached_prefix_is_pinned_and_only_the_rest_is_fresh(pool):
    compute(pool, "first", 1, 3)
    digests, tokens = prompt(1, 5)
    assert pool.admit("second", digests, tokens, 5) == 3
    assert pool.table("second")[:3] == pool.table("first")
    assert pool.counts().held == 5


def test_a_shared_block_is_idle_only_when_its_last_holder_is_gone(pool):
    compute(pool, "a", 1, 2)
    compute(pool, "b", 1, 2)
    pool.release("a")
    assert pool.counts().held == 2
    pool.release("b")
    assert pool.counts().cached == 2


def test_releasing_twice_or_an_unknown_holder_is_harmless(pool):
    pool.admit("r", [], [], 2)
    assert [pool.release("r"), pool.release("r"), pool.release("nobody")] == [True, False, False]
    assert pool.counts().free == 12


def test_a_failed_admission_leaves_everything_unchanged(pool, recycled):
    compute(pool, "idle", 1, 4)
    pool.release("idle")
    pool.admit("held", [], [], 8)
    before = pool.counts()
    digests, tokens = prompt(1, 5)
    assert pool.admit("r", digests, tokens, 5) is None
    assert pool.counts() == before and not pool.holds("r") and recycled == []


def test_blocks_about_to_be_pinned_do_not_count_as_available(pool):
    # 4 idle blocks are the whole cache and the prompt hits all of them: nothing is left to evict for the fifth
    compute(pool, "idle", 1, 4)
    pool.release("idle")
    pool.admit("held", [], [], 8)
    digests, tokens = prompt(1, 5)
    assert pool.admit("r", digests, tokens, 5) is None
    assert pool.admit("r", digests[:4], tokens[:16], 4) == 4


def test_a_hit_and_a_cold_prompt_in_one_step_never_share_a_block():
    # 12 blocks; X (4 blocks) is idle; A hits X and needs 4 more, B is cold and needs 8: only one fits beside X
    pool = BlockPool(13, SIZE)
    compute(pool, "x", 1, 4)
    pool.release("x")
    digests, tokens = prompt(1, 8)
    assert pool.admit("a", digests, tokens, 8) == 4
    assert pool.admit("b", *prompt(2, 8), 8) is None
    pool.check()


def test_an_evicted_prompt_misses_and_its_blocks_have_no_digest(pool):
    compute(pool, "a", 1, 4)
    pool.release("a")
    compute(pool, "b", 2, 12)
    pool.release("b")
    assert pool.match(*prompt(1, 4)) == []
    assert pool.num_evicted == 4


def test_the_least_recently_used_prefix_is_evicted_first_and_tails_before_heads(pool):
    for name in (1, 2, 3):
        compute(pool, name, name, 4)
    for name in (2, 1, 3):
        pool.release(name)
    pool.admit("r", [], [], 6)
    assert [len(pool.match(*prompt(name, 4))) for name in (1, 2, 3)] == [2, 0, 4]


def test_a_duplicate_of_a_cached_digest_stays_unnamed(pool):
    digests, tokens = prompt(1, 2)
    pool.admit("a", digests, tokens, 2)
    pool.admit("b", digests, tokens, 2)
    named = [pool.cache(pool.table(who)[0], digests[0], tokens[:SIZE]) for who in ("a", "b", "a")]
    assert named == [True, False, True]
    pool.release("a")
    pool.release("b")
    assert (pool.counts().cached, pool.counts().free) == (1, 11)


def test_landing_blocks_are_invisible_to_the_cache_until_validated(pool):
    digests, tokens = prompt(1, 3)
    pool.admit("r", digests, tokens, 4, landing=True)
    assert (pool.counts().landing, pool.counts().held) == (4, 0)
    with pytest.raises(AssertionError):
        pool.cache(pool.table("r")[0], digests[0], tokens[:SIZE])
    pool.landed("r")
    assert pool.cache(pool.table("r")[0], digests[0], tokens[:SIZE])
    assert (pool.counts().landing, pool.counts().held) == (0, 4)


def test_an_aborted_landing_drains_until_its_read_is_quiescent(pool, recycled):
    compute(pool, "warm", 1, 2)
    pool.release("warm")
    digests, tokens = prompt(1, 4)
    pool.admit("r", digests, tokens, 5, landing=True)
    assert pool.drain("r") == 3
    assert (pool.counts().draining, pool.counts().cached, pool.counts().landing) == (3, 2, 0)
    assert pool.admit("other", [], [], 10) is None and recycled == []
    assert pool.quiescent("r") == 3
    assert pool.quiescent("r") == 0
    assert pool.admit("other", [], [], 10) == 0


def test_draining_an_unknown_holder_is_harmless(pool):
    assert pool.drain("nobody") == 0


def test_a_block_is_recycled_exactly_when_it_becomes_free(pool, recycled):
    compute(pool, "r", 1, 2)
    pool.grow("r")
    (first, second, third) = pool.table("r")
    assert recycled == []  # fresh blocks need no bump: nobody can have a published run of them
    pool.release("r")
    assert recycled == [third]  # the cached two are still readable
    pool.admit("all", [], [], 12)
    assert recycled == [third, second, first]


def test_a_reclaimable_holder_is_taken_last_and_recycled_only_then(pool, recycled):
    pool.admit("lease", [], [], 4)
    pool.set_reclaimable("lease", True)
    pool.admit("r", [], [], 8)
    assert recycled == [] and pool.holds("lease")
    assert pool.grow("r")
    assert sorted(recycled) == [1, 2, 3, 4] and not pool.holds("lease")


def test_blocks_that_a_reclaimable_holder_shares_with_a_live_one_are_not_spare(pool):
    compute(pool, "lease", 1, 6)
    compute(pool, "live", 1, 6)
    pool.set_reclaimable("lease", True)
    assert pool.admit("r", [], [], 7) is None
    assert pool.admit("r", [], [], 6) == 0
    assert pool.holds("lease")


def test_a_prompt_that_hits_a_reclaimable_lease_does_not_take_it_apart(pool):
    compute(pool, "lease", 1, 6)
    pool.set_reclaimable("lease", True)
    assert pool.admit("r", *prompt(1, 10), 13) is None
    assert pool.admit("r", *prompt(1, 10), 12) == 6
    assert pool.holds("lease")


def test_shared_blocks_are_counted_per_holder(pool):
    pool.admit("request", [], [], 3)
    pool.share(("request", 0), pool.table("request")[:2])
    pool.release("request")
    assert (pool.counts().held, pool.counts().free) == (2, 10)


def test_a_renamed_holder_keeps_its_table(pool):
    pool.admit("request", [], [], 3)
    table = list(pool.table("request"))
    pool.rename("request", "sample")
    assert pool.table("sample") == table and not pool.holds("request")


def test_forgetting_a_digest_frees_its_idle_block_but_not_a_held_one(pool):
    compute(pool, "r", 1, 2)
    digests, _ = prompt(1, 2)
    pool.forget(digests[1])
    assert pool.counts().held == 2
    pool.release("r")
    pool.forget(digests[0])
    pool.forget(b"unknown")
    assert pool.counts().free == 12


def test_fresh_blocks_come_in_order_so_that_neighbours_move_together(pool):
    pool.admit("a", [], [], 6)
    pool.release("a")  # recycled from the tail
    pool.admit("b", [], [], 12)
    assert pool.table("b") == sorted(pool.table("b"))


def test_cache_events_follow_caching_and_eviction(pool):
    compute(pool, "r", 1, 2)
    assert pool.take_events().stored == tuple(prompt(1, 2)[0])
    pool.release("r")
    pool.evict_all()
    assert set(pool.take_events().removed) == set(prompt(1, 2)[0])
    assert pool.counts().free == 12


class PoolMachine(RuleBasedStateMachine):
    """Random lives of requests over a tiny pool; a shadow of every block's content shows any token bleed."""

    def __init__(self):
        super().__init__()
        self.generation = [0] * 14
        self.handed_out = {}
        self.content = {}
        self.live, self.landing, self.drained, self.names = {}, {}, set(), 0
        self.pool = BlockPool(14, 2, self._recycle)

    def _recycle(self, block):
        self.generation[block] += 1

    def _fresh(self, blocks):
        for block in blocks:
            assert self.generation[block] > self.handed_out.get(block, -1), "handed out twice in one generation"
            self.handed_out[block] = self.generation[block]
            self.content[block] = None

    @rule(prefix=st.integers(0, 3), tail=st.integers(0, 2), num_blocks=st.integers(1, 7), landing=st.booleans())
    def admit(self, prefix, tail, num_blocks, landing):
        tokens = [prefix, prefix, prefix, prefix, tail, tail] + [tail] * 8
        tokens = tokens[: num_blocks * 2]
        digests = block_digests(tokens, 2, EXTRAS)
        before, self.names = self.pool.counts(), self.names + 1
        cached = self.pool.admit(self.names, digests, tokens, num_blocks, landing)
        if cached is None:
            assert self.pool.counts() == before
            return
        table = self.pool.table(self.names)
        for at in range(cached):
            assert self.content[table[at]] == tokens[: 2 * at + 2], "token bleed"
        self._fresh(table[cached:])
        (self.landing if landing else self.live)[self.names] = (tokens, digests)

    def pick(self, data, holders):
        return data.draw(st.sampled_from(sorted(holders)))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), share=st.floats(0, 1))
    def compute(self, data, share):
        name = self.pick(data, self.live)
        tokens, digests = self.live[name]
        for at in range(int(share * len(digests))):
            block = self.pool.table(name)[at]
            if self.pool.cache(block, digests[at], tokens[2 * at : 2 * at + 2]):
                self.content[block] = tokens[: 2 * at + 2]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), how=st.sampled_from(["release", "drain"]))
    def end(self, data, how):
        name = self.pick(data, self.live)
        del self.live[name]
        if how == "release":
            self.pool.release(name)
        elif self.pool.drain(name):
            self.drained.add(name)
        assert not self.pool.release(name)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), flag=st.booleans())
    def lease(self, data, flag):
        self.pool.set_reclaimable(self.pick(data, self.live), flag)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def grow(self, data):
        name = self.pick(data, self.live)
        self.pool.set_reclaimable(name, False)
        if self.pool.grow(name):
            self._fresh(self.pool.table(name)[-1:])

    @precondition(lambda self: self.landing)
    @rule(data=st.data(), how=st.sampled_from(["landed", "aborted"]))
    def read_ends(self, data, how):
        name = self.pick(data, self.landing)
        entry = self.landing.pop(name)
        if how == "landed":
            self.pool.landed(name)
            self.live[name] = entry
        elif self.pool.drain(name):
            self.drained.add(name)

    @precondition(lambda self: self.drained)
    @rule(data=st.data())
    def quiescent(self, data):
        name = self.pick(data, self.drained)
        self.drained.discard(name)
        assert self.pool.quiescent(name) > 0

    @invariant()
    def every_block_has_one_state(self):
        self.pool.check()
        for name in [name for name in self.live if not self.pool.holds(name)]:
            del self.live[name]  # reclaimed

    def teardown(self):
        for name in [*self.live, *self.landing]:
            self.pool.release(name)
        for name in self.drained:
            self.pool.quiescent(name)
        self.pool.check()
        counts = self.pool.counts()
        assert (counts.held, counts.landing, counts.draining) == (0, 0, 0)
        assert counts.free + counts.cached == 13


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, database=None)
TestPoolMachine = PoolMachine.TestCase
