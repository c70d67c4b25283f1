"""Workers come, drain, leave, and tell what they have cached."""

from __future__ import annotations

from dataclasses import replace

from coordinator_stage import LAYOUT, Stage, hello

from coordinator.events import FromSupervisor, FromWorker, Ignored, WorkerLost
from pdserve.messages import (
    CacheEvents,
    Drop,
    Leave,
    Prefill,
    ResyncCache,
    Roster,
    WorkerGone,
)


def test_everybody_learns_of_a_new_worker():
    stage = Stage(prefill=1, decode=1)
    assert [peer.name for peer in stage.to("p0.1", Roster)[-1].peers] == ["p0", "d0"]
    assert [(told.worker, told.state) for told in stage.told] == [("p0", "ready"), ("d0", "ready")]


def test_a_pool_of_another_layout_is_refused_with_the_difference():
    stage = Stage()
    stage.join("p9", "prefill", layout=replace(LAYOUT, block_size=16))
    assert "block_size differs: 4 here, 16 there" in stage.to("p9.1", Leave)[0].reason
    assert len(stage.machine.snapshot_pools()["prefill"]["workers"]) == 1


def test_a_drained_worker_gets_nothing_new_and_leaves_when_it_holds_nothing():
    stage = Stage(prefill=2)
    stage.submit(1)
    busy = stage.land().owner
    stage.drain(busy[:2])
    stage.submit(2)
    assert len(stage.to(busy, Prefill)) == 1 and stage.to(busy, Leave) == []
    stage.tokens(busy, stage.to(busy, Prefill)[0].key, 6, 10)
    stage.released(busy, stage.to(busy, Prefill)[0].key)
    assert len(stage.to(busy, Leave)) == 1
    assert [told.state for told in stage.told[-2:]] == ["draining", "drained"]


def test_an_idle_worker_leaves_at_once():
    stage = Stage(decode=2)
    stage.drain("d1")
    assert len(stage.to("d1.1", Leave)) == 1


def test_draining_twice_or_an_unknown_worker_is_ignored():
    stage = Stage(decode=2)
    stage.drain("d1")
    assert stage.drain("d1") == [Ignored("duplicate_drain")]
    assert stage.drain("x") == [Ignored("unknown_worker")]


def test_a_worker_that_left_is_nobody_to_kill():
    stage = Stage(decode=2)
    stage.drain("d1")
    stage.step(WorkerLost("d1.1", "left"))
    assert stage.told[-1].state == "drained"


def test_a_process_that_ended_is_lost_by_name():
    stage = Stage(prefill=2)
    stage.submit()
    owner = stage.land().owner
    stage.step(FromSupervisor(WorkerGone(worker=owner[:2], epoch="", reason="exit status -9")))
    assert stage.land().owner != owner and stage.to("d0.1", Drop)


def test_the_news_of_a_process_that_was_replaced_leaves_its_successor_alone():
    stage = Stage()
    stage.join("p0", "prefill", epoch="p0.2")
    gone = FromSupervisor(WorkerGone(worker="p0", epoch="p0.1", reason="exit status -9"))
    assert stage.step(gone) == [Ignored("unknown_worker")]
    assert stage.machine.readiness(0.0)[0]


def test_a_gap_in_cache_events_asks_for_a_snapshot_once():
    stage = Stage()

    def events(first: int, *stored: bytes, is_snapshot: bool = False) -> FromWorker:
        return FromWorker("p0.1", CacheEvents(first=first, stored=stored, removed=(), is_snapshot=is_snapshot))

    stage.step(events(0, b"a"))
    stage.step(events(2, b"b"))
    stage.step(events(3, b"c"))
    assert len(stage.to("p0.1", ResyncCache)) == 1
    assert stage.machine.snapshot_pools()["prefill"]["workers"][0]["cached_digests"] == 0
    stage.step(events(4, b"a", b"b", b"c", is_snapshot=True))
    assert stage.machine.snapshot_pools()["prefill"]["workers"][0]["cached_digests"] == 3


def test_a_hello_that_lies_about_its_epoch_is_ignored():
    stage = Stage()
    assert stage.step(FromWorker("other", hello("p5", "prefill"))) == [Ignored("bad_hello")]
