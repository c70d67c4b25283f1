"""What the core does when workers die, refuse, yield or lie."""

from __future__ import annotations

import pytest
from coordinator_stage import Stage

from coordinator.events import FromWorker, Ignored, ResetPeer, WorkerLost
from pdserve.messages import Drop, DropSample, Ended, Key, Land, Prefill, Roster, Start, StepReport, WorkerState


def test_a_request_fails_aloud_when_no_prefill_worker_is_left():
    stage = Stage(prefill=1)
    stage.submit()
    stage.step(WorkerLost("p0.1", "killed"))
    ended = stage.ended()
    assert (ended.outcome, ended.status, ended.message) == (
        "failed",
        503,
        "no prefill worker is ready; they are starting, or were lost",
    )
    assert stage.to("d0.1", Drop) == [Drop(key=stage.land().key)]


def test_a_prompt_whose_prefill_worker_died_is_placed_on_another():
    stage = Stage(prefill=2)
    stage.submit()
    first = stage.land().owner
    stage.step(WorkerLost(first, "killed"))
    assert stage.to("d0.1", Drop) == [Drop(key=Key(request="r-c-1", attempt=1))]
    assert stage.land().owner not in ("", first) and stage.land().key.attempt == 2
    stage.tokens(stage.land().owner, stage.land().key, 6, 10)
    assert stage.text() == [10]


def test_a_token_already_sent_is_never_sampled_again():
    stage = Stage(prefill=2)
    stage.submit()
    first = stage.land().owner
    stage.tokens(first, stage.land().key, 6, 10)
    stage.step(WorkerLost(first, "killed"))
    second = stage.prefill(stage.land().owner)
    assert second.tokens == (101, 102, 103, 104, 105, 106, 10) and second.num_prompt == 6
    stage.tokens(stage.land().owner, second.key, 7, 11)
    assert stage.text() == [10, 11]
    assert stage.to("d0.1", Start)[-1] == Start(key=second.key, sample=0, position=7, token=11)


def test_a_dead_prefill_worker_does_not_matter_once_everything_was_read():
    stage = Stage(prefill=2)
    stage.submit()
    owner = stage.land().owner
    stage.tokens(owner, stage.land().key, 6, 10)
    stage.landed("d0.1", stage.land().key)
    stage.step(WorkerLost(owner, "killed"))
    assert len(stage.to("d0.1", Land)) == 1
    stage.tokens("d0.1", stage.land().key, 7, 11)
    assert stage.text() == [10, 11]


def test_a_failure_where_nothing_is_needed_any_more_is_ignored():
    stage = Stage()
    stage.submit()
    key = stage.land().key
    stage.tokens("p0.1", key, 6, 10)
    stage.landed("d0.1", key)
    assert stage.fail("p0.1", key, "internal") == [Ignored("late_failure")]


def test_a_prefill_worker_that_let_go_before_it_died_was_read():
    stage = Stage(prefill=2)
    stage.submit()
    owner, key = stage.land().owner, stage.land().key
    stage.tokens(owner, key, 6, 10)
    stage.released(owner, key)
    stage.step(WorkerLost(owner, "killed"))
    assert len(stage.to("d0.1", Land)) == 1


def test_a_stream_goes_on_at_the_next_position_after_its_decode_worker_died():
    stage = Stage(decode=2)
    stage.submit()
    decode = stage.prefill().reader
    stage.tokens("p0.1", stage.prefill().key, 6, 10)
    stage.landed(decode, stage.prefill().key)
    stage.tokens(decode, stage.prefill().key, 7, 11, 12)
    stage.step(WorkerLost(decode, "killed"))
    again = stage.prefill()
    assert again.tokens[6:] == (10, 11, 12) and again.reader not in ("", decode)
    stage.tokens("p0.1", again.key, 9, 13)
    stage.tokens(again.reader, again.key, 10, 14)
    assert stage.text() == [10, 11, 12, 13, 14] and stage.machine.snapshot_requests()[0]["attempts"] == 2


def test_a_stream_with_one_token_to_go_needs_no_second_decode_worker():
    stage = Stage(decode=1, on_empty_pool="queue")
    key = stage.decoding(max_tokens=3)
    stage.tokens("d0.1", key, 7, 11)
    stage.step(WorkerLost("d0.1", "killed"))
    assert stage.prefill().reader == ""
    stage.tokens("p0.1", stage.prefill().key, 8, 12)
    assert stage.ended().outcome == "finished" and stage.text() == [10, 11, 12]


def test_samples_that_have_not_parted_keep_their_first_tokens():
    stage = Stage(decode=2)
    stage.submit(n=2)
    decode, key = stage.prefill().reader, stage.prefill().key
    stage.tokens("p0.1", key, 6, 10, sample=0)
    stage.step(WorkerLost(decode, "killed"))
    again = stage.prefill()
    assert again.tokens == (101, 102, 103, 104, 105, 106)
    assert stage.to(again.reader, Start) == [Start(key=again.key, sample=0, position=6, token=10)]
    assert stage.tokens("p0.1", again.key, 6, 99, sample=0) == [Ignored("low_position")]
    stage.tokens("p0.1", again.key, 6, 20, sample=1)
    assert (stage.text(sample=0), stage.text(sample=1)) == ([10], [20])
    assert [start.sample for start in stage.to(again.reader, Start)] == [0, 1]


def test_a_sample_that_was_over_is_over_in_the_next_attempt_too():
    stage = Stage(decode=2)
    stage.submit(n=2, stop_token_ids=(5,))
    decode, key = stage.prefill().reader, stage.prefill().key
    stage.tokens("p0.1", key, 6, 5, sample=0)
    stage.step(WorkerLost(decode, "killed"))
    again = stage.prefill()
    assert stage.to(again.reader, DropSample) == [DropSample(key=again.key, sample=0, num_generated=1)]


def test_samples_that_have_parted_cannot_be_continued_and_say_so():
    stage = Stage(decode=2)
    stage.submit(n=2)
    decode, key = stage.prefill().reader, stage.prefill().key
    for sample in (0, 1):
        stage.tokens("p0.1", key, 6, 10, sample=sample)
    stage.landed(decode, key)
    stage.tokens(decode, key, 7, 11, sample=0)
    stage.step(WorkerLost(decode, "killed"))
    ended = stage.ended()
    assert ended.outcome == "failed" and "2 samples had already parted" in ended.message
    assert (ended.status, ended.code) == (503, "not_resumable") and ended.retry_after_s > 0


@pytest.mark.parametrize("kind", ["kv_unreadable", "owner_lost", "handoff_timeout", "refused", "internal"])
def test_an_attempt_that_cannot_go_on_is_tried_three_times(kind):
    stage = Stage()
    stage.submit()
    for attempt in (1, 2, 3):
        assert stage.land().key.attempt == attempt
        stage.fail("d0.1", stage.land().key, kind)
    assert stage.ended().message == f"3 placements failed, the last one by {kind}: because"
    assert stage.ended().attempts == 3 and stage.ended().status == 500


def test_on_kv_error_fail_ends_a_request_whose_kv_could_not_be_read():
    stage = Stage(on_kv_error="fail")
    stage.submit()
    stage.fail("d0.1", stage.land().key, "kv_unreadable")
    assert stage.ended().outcome == "failed" and stage.ended().code == "kv_unreadable"


def test_yielding_does_not_count_as_a_failure():
    stage = Stage()
    stage.submit()
    for _ in range(5):
        stage.fail("d0.1", stage.land().key, "yielded")
    assert stage.ended() is None and stage.land().key.attempt == 6


def test_a_request_that_yielded_keeps_its_place_in_the_queue():
    stage = Stage(pool=9, landing_share=1.0)
    for ticket in (1, 2, 3):
        stage.submit(ticket, prompt=15, max_tokens=2)
    stage.fail("d0.1", Key(request="r-c-1", attempt=1), "yielded")
    for worker in ("p0.1", "d0.1"):
        stage.released(worker, Key(request="r-c-1", attempt=1))
    assert [land.key.request for land in stage.to("d0.1", Land)] == ["r-c-1", "r-c-2", "r-c-1"]


def test_a_worker_that_failed_a_request_is_avoided():
    stage = Stage(decode=2)
    stage.submit()
    refusing = stage.prefill().reader
    stage.fail(refusing, stage.prefill().key, "refused")
    assert stage.prefill().reader not in ("", refusing)


def test_a_failure_of_an_old_attempt_is_ignored():
    stage = Stage()
    stage.submit()
    old = stage.land().key
    stage.fail("d0.1", old, "internal")
    assert stage.fail("d0.1", old, "internal") == [Ignored("old_attempt")]
    assert stage.land().key.attempt == 2


def test_a_decode_worker_that_lets_go_of_a_running_request_has_failed():
    stage = Stage()
    key = stage.decoding()
    stage.released("d0.1", key)
    assert stage.land().key.attempt == 2


def test_a_worker_once_dead_stays_dead():
    stage = Stage(prefill=2)
    stage.submit()
    owner, key = stage.land().owner, stage.land().key
    stage.step(WorkerLost(owner, "silent for 2 s"))
    reset = ResetPeer(owner)
    assert stage.tokens(owner, key, 6, 10) == [Ignored("dead_epoch"), reset]
    assert stage.join(owner.split(".")[0], "prefill", epoch=owner) == [Ignored("dead_epoch"), reset]
    assert stage.beat(owner) == [Ignored("dead_epoch"), reset]
    assert stage.step(FromWorker("never seen", StepReport(tokens=(), stamps=())))[1].epoch == "never seen"


def test_everybody_left_learns_who_died_and_the_supervisor_who_to_kill():
    stage = Stage(prefill=2, decode=1)
    stage.step(WorkerLost("p0.1", "silent for 2 s"))
    assert [peer.name for peer in stage.to("d0.1", Roster)[-1].peers] == ["p1", "d0"]
    assert stage.told[-1] == WorkerState(worker="p0", epoch="p0.1", state="suspect", reason="silent for 2 s")


def test_a_name_that_comes_back_with_a_new_epoch_has_lost_the_old_one():
    stage = Stage()
    stage.submit()
    stage.join("p0", "prefill", epoch="p0.2")
    assert stage.land().owner == "p0.2" and stage.land().key.attempt == 2
    assert [peer.epoch for peer in stage.to("d0.1", Roster)[-1].peers] == ["d0.1", "p0.2"]


def test_only_requests_on_the_dead_worker_are_touched():
    stage = Stage(decode=2, router="round_robin")
    stage.submit(1)
    stage.submit(2)
    stage.step(WorkerLost("d0.1", "killed"))
    assert len(stage.to("p0.1", Prefill)) == 3 and stage.to("f", Ended) == []


def test_requests_that_wait_for_a_pool_to_come_back_are_placed_when_it_does():
    stage = Stage(prefill=1, on_empty_pool="queue")
    stage.submit()
    stage.step(WorkerLost("p0.1", "killed"))
    assert stage.ended() is None
    stage.join("p0", "prefill", epoch="p0.2")
    assert stage.land().owner == "p0.2"


def beats(stage: Stage, worker: str, *held: Key, count: int = 4, is_turning: bool = True) -> None:
    """Heartbeats a second apart."""
    for step in range(count):
        stage.now_s += 1
        stage.beat(worker, *held, step=step if is_turning else 7)


def test_a_key_that_a_worker_should_not_hold_is_dropped_again_if_it_stays():
    stage = Stage()
    stray = Key(request="r-old-1", attempt=1)
    beats(stage, "p0.1", stray, count=2)
    assert stage.to("p0.1", Drop) == []
    beats(stage, "p0.1", stray, count=1)
    assert stage.to("p0.1", Drop) == [Drop(key=stray)]


def test_a_key_that_is_being_let_go_is_no_difference():
    stage = Stage()
    key = stage.decoding(max_tokens=2)
    stage.beat("d0.1", key, step=1)
    stage.tokens("d0.1", key, 7, 11)
    stage.beat("d0.1", key, step=2)
    stage.released("d0.1", key)
    stage.beat("d0.1", step=3)
    assert stage.to("d0.1", Drop) == [Drop(key=key)]
    stage.nothing_leaked()


def test_a_placement_that_a_worker_never_mentions_has_failed_there():
    stage = Stage()
    stage.submit()
    beats(stage, "p0.1", stage.land().key, count=1)
    beats(stage, "d0.1", count=2)
    assert stage.land().key.attempt == 1
    beats(stage, "d0.1")
    assert stage.land().key.attempt == 2


def test_a_heartbeat_older_than_the_placement_misses_nothing():
    stage = Stage()
    stage.submit()
    for step in range(10):
        stage.now_s += 0.1
        stage.beat("d0.1", step=step)
    assert stage.land().key.attempt == 1


def test_a_worker_whose_loop_does_not_turn_cannot_miss_anything():
    stage = Stage()
    stage.submit()
    beats(stage, "d0.1", count=9, is_turning=False)
    assert stage.land().key.attempt == 1


def test_a_promise_that_the_worker_has_forgotten_is_forgotten():
    stage = Stage()
    key = stage.decoding()
    stage.abandon()
    beats(stage, "d0.1", count=6)
    assert stage.to("d0.1", Drop) == [Drop(key=key)]
    stage.nothing_leaked()


def test_a_second_attempt_of_several_samples_has_a_hand_off_timeout_too():
    stage = Stage(decode=2)
    stage.submit(n=2)
    decode, key = stage.prefill().reader, stage.prefill().key
    for sample in (0, 1):
        stage.tokens("p0.1", key, 6, 10 + sample, sample=sample)
    stage.step(WorkerLost(decode, "killed"))
    stage.released("p0.1", key)
    again = stage.prefill().key
    for sample in (0, 1):
        stage.tokens("p0.1", again, 6, 10 + sample, sample=sample)
    assert (stage.prefill().key.attempt, stage.ended()) == (2, None)
    stage.wait(11)
    assert stage.prefill().key.attempt == 3
