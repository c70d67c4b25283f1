"""Leases only oblige: expiry makes blocks reclaimable, reclaiming takes them."""

import pytest

from pdserve.blocks import BlockPool
from pdserve.leases import Leases


@pytest.fixture
def pool():
    pool = BlockPool(9, 2)  # 8 usable
    yield pool
    pool.check()


def leased(pool, holder="r", num_blocks=4):
    leases = Leases(pool, ttl_s=10.0)
    pool.admit(holder, [], [], num_blocks)
    leases.grant(holder, now_s=0.0)
    return leases


def test_an_expired_lease_keeps_its_blocks_until_they_are_needed(pool):
    leases = leased(pool)
    assert leases.expire(now_s=10.0) == ["r"]
    assert pool.counts().held == 4
    assert pool.admit("other", [], [], 4) == 0
    assert pool.holds("r")


def test_an_expired_lease_is_reclaimed_when_nothing_else_is_left(pool):
    leases = leased(pool)
    leases.expire(now_s=10.0)
    assert pool.admit("other", [], [], 5) == 0
    assert not pool.holds("r") and "r" not in leases and len(leases) == 0


def test_idle_cache_goes_before_an_expired_lease(pool):
    leases = leased(pool)
    pool.admit("old", [], [], 4)
    for block, digest in zip(pool.table("old"), (b"1", b"2", b"3", b"4"), strict=True):
        pool.cache(block, digest, [0, 0])
    pool.release("old")
    leases.expire(now_s=10.0)
    assert pool.admit("other", [], [], 4) == 0
    assert pool.holds("r") and pool.counts().cached == 0


def test_a_live_lease_is_never_reclaimed(pool):
    leases = leased(pool)
    leases.expire(now_s=9.9)
    assert pool.admit("other", [], [], 5) is None


def test_a_renewal_after_expiry_makes_the_lease_whole_again(pool):
    leases = leased(pool)
    leases.expire(now_s=10.0)
    assert leases.renew("r", now_s=11.0)
    assert pool.admit("other", [], [], 5) is None


def test_a_reclaimed_lease_cannot_be_renewed(pool):
    leases = leased(pool)
    leases.expire(now_s=10.0)
    pool.admit("other", [], [], 8)
    assert not leases.renew("r", now_s=11.0)


def test_expiry_is_counted_once(pool):
    leases = leased(pool)
    assert leases.expire(now_s=10.0) == ["r"]
    assert leases.expire(now_s=11.0) == []
    assert leases.num_expired == 1


def test_releasing_twice_is_harmless(pool):
    leases = leased(pool)
    assert leases.release("r") is True
    assert leases.release("r") is False
    assert pool.counts().free == 8
