"""The life of a request in the core, event by event."""

from __future__ import annotations

import pytest
from coordinator_stage import EOS, STOP_TOKEN, Stage

from coordinator.events import FromWorker, FrontLost, Ignored, WorkerLost
from pdserve import phases
from pdserve.messages import Drop, DropSample, Ended, Key, Land, Prefill, Start, StepReport, TokenOut


def test_a_request_is_placed_on_both_sides_in_the_step_it_arrives():
    stage = Stage()
    stage.submit()
    assert stage.prefill().reader == "d0.1" and stage.land().owner == "p0.1"
    assert stage.prefill().key == stage.land().key == Key(request="r-c-1", attempt=1)


def test_the_first_token_goes_to_the_client_before_the_decode_worker_may_start():
    stage = Stage()
    stage.submit()
    stage.tokens("p0.1", stage.prefill().key, 6, 10)
    kinds = [type(action.message).__name__ for action in stage.last]
    assert kinds == ["Output", "Start"]
    assert stage.to("d0.1", Start) == [Start(key=stage.land().key, sample=0, position=6, token=10)]


def test_a_request_ends_once_and_both_sides_let_go():
    stage = Stage()
    stage.submit(max_tokens=3)
    key = stage.prefill().key
    stage.tokens("p0.1", key, 6, 10)
    stage.landed("d0.1", key)
    stage.tokens("d0.1", key, 7, 11, 12)
    assert stage.text() == [10, 11, 12] and stage.sample_ends() == [(0, "length", 3)]
    assert stage.ended().outcome == "finished" and stage.ended().mode == "disaggregated"
    assert stage.to("p0.1", Drop) == stage.to("d0.1", Drop) == [Drop(key=key)]
    stage.released("p0.1", key)
    stage.released("d0.1", key)
    stage.nothing_leaked()


def test_a_prefill_worker_that_has_let_go_is_not_told_to_drop():
    stage = Stage()
    key = stage.decoding(max_tokens=2)
    stage.tokens("d0.1", key, 7, 11)
    assert stage.to("p0.1", Drop) == [] and stage.to("d0.1", Drop) == [Drop(key=key)]


def test_one_token_needs_no_decode_worker():
    stage = Stage()
    stage.submit(max_tokens=1)
    assert stage.prefill().reader == "" and stage.to("d0.1", Land) == []
    stage.tokens("p0.1", stage.prefill().key, 6, 10)
    assert stage.ended().outcome == "finished" and stage.ended().decode_worker == ""
    stage.released("p0.1", stage.prefill().key)
    stage.nothing_leaked()


def test_one_token_is_served_without_any_decode_pool():
    stage = Stage(decode=0)
    stage.submit(max_tokens=1)
    stage.tokens("p0.1", stage.prefill().key, 6, 10)
    assert stage.ended().outcome == "finished"


@pytest.mark.parametrize("how", [{"token": EOS}, {"token": 9, "stop_token_ids": (9,)}, {"token": STOP_TOKEN}])
def test_a_request_that_ends_at_its_first_token_never_starts_to_decode(how):
    stage = Stage()
    token = how.pop("token")
    stage.submit(stop=("stop",), **how)
    stage.tokens("p0.1", stage.prefill().key, 6, token)
    assert stage.sample_ends() == [(0, "stop", 1)] and stage.ended().outcome == "finished"
    assert stage.to("d0.1", Start) == [] and len(stage.to("d0.1", Drop)) == 1


def test_a_stop_string_before_min_tokens_is_ignored():
    stage = Stage()
    stage.submit(stop=("stop",), min_tokens=2)
    stage.tokens("p0.1", stage.prefill().key, 6, STOP_TOKEN)
    assert stage.ended() is None and len(stage.to("d0.1", Start)) == 1


def test_ignore_eos_goes_on_after_eos():
    stage = Stage()
    stage.submit(ignore_eos=True)
    stage.tokens("p0.1", stage.prefill().key, 6, EOS)
    assert stage.ended() is None and len(stage.to("d0.1", Start)) == 1


def test_a_token_that_was_seen_before_is_ignored():
    stage = Stage()
    key = stage.decoding()
    stage.tokens("d0.1", key, 7, 11)
    assert stage.tokens("d0.1", key, 7, 99) == [Ignored("low_position")]
    assert stage.text() == [10, 11]


def test_a_gap_ends_the_attempt_but_keeps_what_came_before_it():
    stage = Stage()
    key = stage.decoding()
    outs = [(7, 11), (9, 13)]
    report = StepReport(
        tokens=tuple(
            TokenOut(key=key, sample=0, position=position, token=token, logprob=None, top=())
            for position, token in outs
        ),
        stamps=(),
    )
    stage.step(FromWorker("d0.1", report))
    assert stage.text() == [10, 11]
    assert stage.prefill().key.attempt == 2 and stage.prefill().tokens[-2:] == (10, 11)


def test_a_stop_found_by_the_front_end_discards_the_overrun():
    stage = Stage()
    key = stage.decoding()
    stage.tokens("d0.1", key, 7, 11, 12, 13)
    stage.found_stop(2)
    assert stage.sample_ends() == [(0, "stop", 2)] and stage.ended().outcome == "finished"
    assert stage.machine.count("pdserve_discarded_tokens_total") == 2
    assert stage.to("d0.1", Drop) == [Drop(key=key)]


def test_a_stop_found_twice_or_too_late_is_ignored():
    stage = Stage()
    stage.decoding(n=1)
    assert stage.found_stop(5) == [Ignored("late_stop")]
    stage.found_stop(1)
    assert stage.found_stop(1) == [Ignored("unknown_ticket")]


def test_samples_start_and_end_by_themselves():
    stage = Stage()
    stage.submit(n=3, max_tokens=3)
    key = stage.prefill().key
    stage.tokens("p0.1", key, 6, 10, sample=0)
    stage.tokens("p0.1", key, 6, EOS, sample=1)
    stage.tokens("p0.1", key, 6, 30, sample=2)
    assert [start.sample for start in stage.to("d0.1", Start)] == [0, 2]
    assert stage.to("d0.1", DropSample) == [DropSample(key=key, sample=1, num_generated=1)]
    stage.landed("d0.1", key)
    stage.tokens("d0.1", key, 7, 11, 12, sample=0)
    assert stage.ended() is None
    stage.tokens("d0.1", key, 7, 31, EOS, sample=2)
    assert stage.sample_ends() == [(1, "stop", 1), (0, "length", 3), (2, "stop", 3)]
    assert stage.ended().outcome == "finished"


def test_the_stop_of_one_sample_leaves_the_others_alone():
    stage = Stage()
    stage.submit(n=2)
    key = stage.prefill().key
    for sample in (0, 1):
        stage.tokens("p0.1", key, 6, 10, sample=sample)
    stage.tokens("d0.1", key, 7, 11, 12, sample=0)
    stage.found_stop(2, sample=0)
    stage.tokens("d0.1", key, 9, 13, sample=0)
    assert stage.to("d0.1", DropSample) == [DropSample(key=key, sample=0, num_generated=2)]
    assert stage.ended() is None and stage.machine.count("pdserve_discarded_tokens_total") == 2


def test_a_client_that_leaves_ends_its_request_wherever_it_is():
    stage = Stage()
    stage.submit()
    stage.abandon()
    assert stage.ended().outcome == "cancelled"
    assert len(stage.to("p0.1", Drop)) == len(stage.to("d0.1", Drop)) == 1
    assert stage.abandon() == [Ignored("unknown_ticket")]
    key = stage.prefill().key
    assert stage.tokens("p0.1", key, 6, 10) == [Ignored("old_attempt")]
    stage.released("p0.1", key)
    stage.released("d0.1", key)
    stage.nothing_leaked()


def test_what_was_promised_stays_promised_until_the_worker_lets_go():
    stage = Stage(pool=4)
    stage.submit(1)
    stage.abandon(1)
    stage.submit(2, max_tokens=2)
    assert len(stage.to("p0.1", Prefill)) == 1
    stage.released("p0.1", Key(request="r-c-1", attempt=1))
    stage.released("d0.1", Key(request="r-c-1", attempt=1))
    assert len(stage.to("p0.1", Prefill)) == 2


def test_a_lost_front_end_cancels_all_its_requests():
    stage = Stage()
    stage.submit(1)
    stage.submit(2)
    stage.submit(1, front="g")
    stage.step(FrontLost("f"))
    assert [stage.ended(ticket).outcome for ticket in (1, 2)] == ["cancelled", "cancelled"]
    assert stage.to("g", Ended) == [] and stage.machine.num_live == 1


def test_a_ticket_that_is_in_use_is_ignored():
    stage = Stage()
    stage.submit(1)
    assert stage.submit(1) == [Ignored("duplicate_ticket")]


def test_tokens_of_unknown_samples_and_requests_are_ignored():
    stage = Stage()
    key = stage.decoding()
    assert stage.tokens("d0.1", key, 7, 1, sample=5) == [Ignored("unknown_sample")]
    assert stage.tokens("d0.1", Key(request="x", attempt=1), 7, 1) == [Ignored("old_attempt")]
    assert stage.tokens("d0.1", Key(request=key.request, attempt=9), 7, 1) == [Ignored("old_attempt")]


def test_a_worker_cannot_speak_for_a_request_it_was_not_given():
    stage = Stage(prefill=2)
    stage.submit()
    other = "p1.1" if stage.to("p0.1", Prefill) else "p0.1"
    assert stage.tokens(other, stage.land().key, 6, 10) == [Ignored("old_attempt")]


def test_phases_sum_to_what_the_client_saw():
    stage = Stage()
    stage.submit(max_tokens=2, received_ns=-1_000_000)
    stage.now_s = 0.5
    stage.tokens("p0.1", stage.prefill().key, 6, 10)
    stage.now_s = 2.0
    stage.tokens("d0.1", stage.prefill().key, 7, 11)
    assert sum(spent for _, spent in stage.ended().phases_ns) == 2_001_000_000


def test_a_request_that_takes_too_long_fails():
    stage = Stage(request_timeout_s=20)
    stage.submit(timeout_s=5)
    assert stage.machine.next_deadline_s() == 5
    stage.wait(5)
    assert (stage.ended().outcome, stage.ended().status) == ("failed", 504)
    assert stage.machine.next_deadline_s() is None


def test_a_request_that_nobody_has_room_for_is_given_up_after_the_queue_timeout():
    stage = Stage(pool=4, queue_timeout_s=3)
    stage.submit(1)
    stage.submit(2)
    stage.submit(3)
    assert stage.ended(3) is None
    stage.wait(3)
    assert (stage.ended(3).status, stage.ended(3).code) == (503, "queue_timeout")
    assert stage.ended(3).retry_after_s >= 1


def test_kv_that_nobody_reads_in_time_is_placed_again():
    stage = Stage(handoff_wait_s=10)
    stage.submit()
    stage.tokens("p0.1", stage.prefill().key, 6, 10)
    assert stage.machine.next_deadline_s() == 10
    stage.wait(10)
    assert stage.prefill().key.attempt == 2 and stage.prefill().tokens[-1] == 10


def test_kv_that_has_landed_is_not_waited_for():
    stage = Stage(handoff_wait_s=10, request_timeout_s=50)
    stage.decoding()
    assert stage.machine.next_deadline_s() == 50


def test_started_and_ended_are_counted():
    stage = Stage()
    stage.submit(1)
    stage.submit(2, prompt=500)
    stage.abandon(1)
    count = stage.machine.count
    assert count("pdserve_requests_started_total") == 2 == count("pdserve_requests_ended_total")
    assert count("pdserve_requests_ended_total", outcome="rejected") == 1
    assert count("pdserve_mode_total", mode="disaggregated") == 1


def test_metrics_are_valid_text_with_the_contract_s_names():
    stage = Stage()
    stage.decoding(max_tokens=2)
    stage.beat("d0.1")
    stage.tokens("d0.1", stage.prefill().key, 7, 11)
    text = stage.machine.metrics_text()
    for name in (
        "pdserve_requests",
        "pdserve_kv_blocks",
        "pdserve_leases",
        "pdserve_ttft_seconds",
        "pdserve_itl_seconds",
    ):
        assert f"# TYPE {name} " in text
    assert 'pdserve_kv_blocks{pool="decode",worker="d0",state="free"} 1\n' in text
    assert 'pdserve_requests_ended_total{outcome="finished"} 1\n' in text


def test_an_operator_sees_where_every_request_is():
    stage = Stage()
    stage.submit()
    assert stage.machine.snapshot_requests()[0]["state"] == "prefill"
    stage.tokens("p0.1", stage.prefill().key, 6, 10)
    assert stage.machine.snapshot_requests()[0]["state"] == "handoff"
    stage.landed("d0.1", stage.prefill().key)
    shown = stage.machine.snapshot_requests()[0]
    assert (shown["state"], shown["num_generated"], shown["decode_worker"]) == ("decode", [1], "d0")


def test_a_lost_worker_that_is_unknown_is_ignored():
    assert Stage().step(WorkerLost("x", "?")) == [Ignored("unknown_worker")]


def test_a_worker_shortens_what_a_stop_string_cut_before_it_lets_go():
    stage = Stage()
    key = stage.decoding(max_tokens=50, stop=("x",))
    stage.tokens("d0.1", key, 7, 1, 3, 4)
    stage.found_stop(2)
    kinds = [message for message in stage.sent["d0.1"] if isinstance(message, Drop | DropSample)]
    assert kinds == [DropSample(key=key, sample=0, num_generated=2), Drop(key=key)]


def test_a_stop_found_after_the_last_token_still_shortens_the_sample():
    stage = Stage()
    stage.submit(n=2, max_tokens=5, stop=("x",))
    key = stage.prefill().key
    for sample in (0, 1):
        stage.tokens("p0.1", key, 6, 10, sample=sample)
    stage.landed("d0.1", key)
    stage.tokens("d0.1", key, 7, 1, 3, 4, 5, sample=0)
    assert stage.found_stop(2, sample=0)[-1] == Ignored("late_stop")
    assert stage.to("d0.1", DropSample) == [DropSample(key=key, sample=0, num_generated=2)]


def test_tokens_that_come_after_the_end_count_as_discarded():
    stage = Stage()
    key = stage.decoding(max_tokens=50, stop=("x",))
    stage.tokens("d0.1", key, 7, 1, 3)
    stage.found_stop(2)
    stage.tokens("d0.1", key, 9, 4, 5)
    assert stage.machine.count("pdserve_discarded_tokens_total") == 3


def test_the_time_between_tokens_is_not_judged_by_an_overrun():
    stage = Stage()
    key = stage.decoding(max_tokens=50, stop=("x",))
    for index in range(5):
        stage.now_s += 0.1
        stage.tokens("d0.1", key, 7 + index, 20 + index)
    stage.found_stop(3)
    assert "pdserve_tpot_seconds_count 1" not in stage.machine.metrics_text()


def test_the_prefill_rate_is_learned_from_what_was_computed_not_from_what_was_expected():
    stage = Stage(pool=2000)
    for ticket in (1, 2, 3, 4):
        stage.submit(ticket, prompt=390)
    for key in [message.key for message in stage.to("p0.1", Prefill)]:
        stage.stamp("p0.1", key, phases.PREFILL_STARTED, 388)
        stage.now_s += 0.005
        stage.stamp("p0.1", key, phases.FIRST_TOKEN_READY)
    assert stage.machine._world.workers.get("p0.1").prefill_rate < 1100


def test_what_never_reached_the_machine_is_exported_beside_what_it_ignored():
    stage = Stage()
    stage.step(FromWorker("never seen", StepReport(tokens=(), stamps=())))
    text = stage.machine.metrics_text({"malformed": 2})
    assert 'pdserve_messages_ignored_total{reason="malformed"} 2' in text
    assert 'pdserve_messages_ignored_total{reason="dead_epoch"} 1' in text
    assert text.count("# TYPE pdserve_messages_ignored_total") == 1
