"""Owners and waiters of digests in work."""

import pytest

from pdserve.computing import Computing


@pytest.fixture
def computing():
    machine = Computing()
    yield machine
    machine.check()


def test_the_first_to_claim_owns_and_the_others_wait(computing):
    assert [computing.claim(b"d", who) for who in ("a", "b", "a")] == [True, False, True]
    assert computing.owner(b"d") == "a"


def test_when_the_owner_ends_the_oldest_waiter_owns_in_the_same_event(computing):
    for who in ("a", "b", "c"):
        computing.claim(b"d", who)
    assert computing.leave("a") == ["b"]
    assert computing.owner(b"d") == "b"
    assert computing.leave("b") == ["c"]


def test_a_waiter_that_left_does_not_inherit(computing):
    for who in ("a", "b", "c"):
        computing.claim(b"d", who)
    computing.leave("b")
    assert computing.leave("a") == ["c"]


def test_a_digest_without_waiters_ends_with_its_owner(computing):
    computing.claim(b"d", "a")
    assert computing.leave("a") == []
    assert len(computing) == 0


def test_a_finished_digest_has_neither_owner_nor_waiters(computing):
    computing.claim(b"d", "a")
    computing.claim(b"d", "b")
    computing.done(b"d")
    computing.done(b"d")
    assert computing.owner(b"d") is None
    assert computing.leave("a") == computing.leave("b") == []


def test_every_digest_of_an_owner_finds_its_own_heir(computing):
    for digest, line in ((b"1", "ab"), (b"2", "ac"), (b"3", "a")):
        for who in line:
            computing.claim(digest, who)
    assert sorted(computing.leave("a")) == ["b", "c"]
    assert (computing.owner(b"1"), computing.owner(b"2"), computing.owner(b"3")) == ("b", "c", None)


def test_leaving_without_anything_is_harmless(computing):
    assert computing.leave("nobody") == []
