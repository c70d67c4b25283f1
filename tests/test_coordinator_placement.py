"""Modes, room and order: where requests go, who waits, who is refused."""

from __future__ import annotations

import pytest
from coordinator_stage import BLOCK, LAYOUT, Stage

from coordinator.events import FromWorker
from coordinator.machine import prompt_digests
from coordinator.placement import decode_blocks
from pdserve.messages import CacheEvents, Key, Land, Prefill


def placed(stage: Stage) -> list[str]:
    return [message.key.request for message in stage.to("p0.1", Prefill)]


# --- modes


def test_never_prefills_where_it_decodes():
    stage = Stage(disaggregate="never")
    stage.submit(max_tokens=2)
    land = stage.land()
    assert land.owner == "" and stage.to("p0.1", Prefill) == []
    stage.tokens("d0.1", land.key, 6, 10)
    stage.tokens("d0.1", land.key, 7, 11)
    stage.released("d0.1", land.key)
    assert stage.ended().mode == "local" and stage.text() == [10, 11]
    stage.nothing_leaked()


def test_no_prefill_workers_by_design_is_colocated():
    stage = Stage(prefill=0, is_colocated=True)
    stage.submit(max_tokens=1)
    stage.tokens("d0.1", stage.land().key, 6, 10)
    assert (stage.ended().mode, stage.ended().prefill_worker) == ("colocated", "")


@pytest.mark.parametrize(("prompt", "mode"), [(7, ""), (8, "p0.1")])
def test_auto_keeps_short_prompts_together(prompt, mode):
    stage = Stage(disaggregate="auto", local_prefill_tokens=8)
    stage.submit(prompt=prompt)
    assert stage.land().owner == mode


def test_auto_counts_what_the_decode_worker_has_cached():
    stage = Stage(disaggregate="auto", local_prefill_tokens=8)
    digests = prompt_digests(range(101, 121), LAYOUT, "")
    events = CacheEvents(first=0, stored=tuple(digests[:4]), removed=(), is_snapshot=False)
    stage.step(FromWorker("d0.1", events))
    stage.submit(prompt=20)
    assert stage.land().owner == ""


def test_an_empty_prefill_pool_may_be_answered_locally():
    stage = Stage(prefill=0, on_empty_pool="local")
    stage.submit()
    assert stage.land().owner == ""


@pytest.mark.parametrize("policy", ["fail", "local"])
def test_an_empty_decode_pool_fails(policy):
    stage = Stage(decode=0, on_empty_pool=policy)
    stage.submit()
    assert (stage.ended().status, stage.ended().message) == (
        503,
        "no decode worker is ready; they are starting, or were lost",
    )


def test_an_empty_pool_may_be_waited_for_but_not_forever():
    stage = Stage(prefill=0, on_empty_pool="queue", queue_timeout_s=30)
    stage.submit()
    stage.wait(29)
    assert stage.ended() is None
    stage.wait(1)
    assert stage.ended().status == 503 and stage.ended().retry_after_s > 0


# --- what never fits


def test_a_prompt_that_no_pool_could_hold_is_refused_with_both_counts():
    stage = Stage(pool=10)
    stage.submit(prompt=41, max_tokens=1)
    assert (stage.ended().outcome, stage.ended().status) == ("rejected", 400)
    assert "41 tokens" in stage.ended().message and "11 KV blocks" in stage.ended().message
    stage.submit(2)
    assert stage.ended(2) is None


def test_an_output_that_no_pool_could_hold_is_refused():
    stage = Stage(pool=10)
    stage.submit(prompt=20, max_tokens=21)
    assert stage.ended().status == 400 and "the largest decode pool has 10" in stage.ended().message


@pytest.mark.parametrize(("max_tokens", "outcome"), [(2, None), (3, "rejected")])
def test_the_context_is_prompt_and_output_together(max_tokens, outcome):
    stage = Stage(max_model_len=128)
    stage.submit(prompt=126, max_tokens=max_tokens)
    ended = stage.ended()
    assert (ended.outcome if ended else None) == outcome


def test_more_samples_than_a_worker_runs_are_refused():
    stage = Stage(running=2)
    stage.submit(n=3)
    assert stage.ended().status == 400 and "at most 2 samples" in stage.ended().message


def test_samples_share_full_blocks_and_copy_the_partial_one():
    assert decode_blocks(LAYOUT, 2 * BLOCK, 1) == 3
    assert decode_blocks(LAYOUT, 2 * BLOCK + 1, 3) == 2 + 3
    assert decode_blocks(LAYOUT, 2 * BLOCK - 1, 3) == 1 + 3


# --- room


def test_late_binding_keeps_at_most_two_batches_on_a_prefill_worker():
    stage = Stage(max_batched_tokens=10)
    for ticket in range(1, 5):
        stage.submit(ticket, prompt=9)
    assert placed(stage) == ["r-c-1", "r-c-2"]
    stage.tokens("p0.1", Key(request="r-c-1", attempt=1), 9, 10)
    assert placed(stage) == ["r-c-1", "r-c-2", "r-c-3"]


def test_a_prompt_longer_than_two_batches_goes_alone():
    stage = Stage(max_batched_tokens=10)
    stage.submit(1, prompt=50)
    stage.submit(2)
    assert placed(stage) == ["r-c-1"]


def test_both_sides_are_taken_together_or_not_at_all():
    stage = Stage(pool=20)
    stage.join("d0", "decode", epoch="d0.2", num_blocks=5)
    stage.submit(1, prompt=6, max_tokens=4)
    stage.submit(2, prompt=9, max_tokens=4)
    assert placed(stage) == ["r-c-1"]
    assert stage.machine.snapshot_pools()["prefill"]["workers"][0]["reserved_blocks"] == 2


def test_landings_take_a_quarter_of_a_decode_pool():
    stage = Stage(pool=40, landing_share=0.25)
    for ticket in (1, 2, 3):
        stage.submit(ticket, prompt=19, max_tokens=2)
    assert placed(stage) == ["r-c-1", "r-c-2"]
    stage.landed("d0.1", Key(request="r-c-1", attempt=1))
    assert placed(stage) == ["r-c-1", "r-c-2", "r-c-3"]


def test_one_landing_is_always_allowed():
    stage = Stage(pool=40, landing_share=0.25)
    stage.submit(1, prompt=99, max_tokens=2)
    assert placed(stage) == ["r-c-1"]


def test_max_running_bounds_the_samples_of_a_decode_worker():
    stage = Stage(running=3)
    for ticket in (1, 2, 3):
        stage.submit(ticket, n=2 if ticket == 1 else 1)
    assert placed(stage) == ["r-c-1", "r-c-2"]


def test_future_growth_counts_before_anything_is_reserved():
    stage = Stage(pool=20)
    stage.decoding(1, max_tokens=60)
    stage.submit(2, max_tokens=30)
    assert placed(stage) == ["r-c-1"]
    stage.submit(3, max_tokens=2)
    assert placed(stage) == ["r-c-1", "r-c-3"]


def test_a_lone_request_is_admitted_if_it_fits_at_all():
    stage = Stage(pool=20)
    stage.submit(1, max_tokens=70)
    assert placed(stage) == ["r-c-1"]


def test_a_stream_s_promise_grows_with_it():
    stage = Stage()
    key = stage.decoding(prompt=6, max_tokens=20)

    def reserved() -> int:
        return stage.machine.snapshot_pools()["decode"]["workers"][0]["reserved_blocks"]

    assert reserved() == 2
    stage.tokens("d0.1", key, 7, *range(10, 20))
    assert reserved() == 5  # 17 tokens and one ahead


# --- order


def test_a_lower_priority_number_is_sooner():
    stage = Stage(max_batched_tokens=5)
    stage.submit(1)
    stage.submit(2, priority=5)
    stage.submit(3, priority=-5)
    stage.tokens("p0.1", Key(request="r-c-1", attempt=1), 6, 10)
    assert placed(stage) == ["r-c-1", "r-c-3"]


def test_small_requests_pass_a_big_one_only_so_often():
    stage = Stage(pool=40, max_bypasses=3, landing_share=1.0)
    stage.submit(1, prompt=30, max_tokens=2)
    stage.submit(2, prompt=150, max_tokens=2)
    for ticket in range(3, 9):
        stage.submit(ticket, prompt=3, max_tokens=2)
    assert placed(stage) == ["r-c-1", "r-c-3", "r-c-4", "r-c-5"]
    for request in (1, 3, 4, 5):
        for worker in ("p0.1", "d0.1"):
            key = Key(request=f"r-c-{request}", attempt=1)
            if worker == "p0.1":
                stage.tokens(worker, key, 30 if request == 1 else 3, 2)
            stage.released(worker, key)
    assert placed(stage)[4] == "r-c-2"


# --- the door


def test_a_full_queue_refuses_with_retry_after():
    stage = Stage(max_batched_tokens=3, max_queued_requests=2)
    for ticket in range(1, 5):
        stage.submit(ticket)
    assert (stage.ended(4).outcome, stage.ended(4).status) == ("rejected", 429)
    assert stage.ended(4).retry_after_s >= 1 and stage.ended(3) is None


def test_every_sample_of_a_waiting_request_counts():
    stage = Stage(max_batched_tokens=3, max_queued_requests=4)
    for ticket, n in ((1, 1), (2, 3), (3, 2), (4, 1), (5, 1)):
        stage.submit(ticket, n=n)
    assert [ticket for ticket in range(1, 6) if stage.ended(ticket)] == [3, 5]
    assert stage.ended(3).status == 429


def test_more_samples_than_a_decode_worker_runs_are_the_caller_s_fault():
    stage = Stage(running=3)
    stage.submit(1, n=4)
    assert (stage.ended(1).status, stage.ended(1).code) == (400, "invalid_value")
    stage.submit(2, n=4, max_tokens=1)
    assert stage.ended(2) is None


def test_queued_tokens_are_bounded_but_one_request_may_always_wait():
    stage = Stage(max_batched_tokens=3, max_queued_tokens=10)
    stage.submit(1)
    stage.submit(2, prompt=30)
    stage.submit(3)
    assert stage.ended(2) is None and stage.ended(3).status == 429


def test_a_tenant_has_a_budget_of_live_requests():
    stage = Stage(max_requests_per_tenant=1)
    stage.submit(1, tenant="a")
    stage.submit(2, tenant="a")
    stage.submit(3, tenant="b")
    assert stage.ended(2).status == 429 and stage.ended(3) is None
    stage.abandon(1)
    stage.submit(4, tenant="a")
    assert stage.ended(4) is None


def test_a_deadline_that_cannot_be_met_is_refused_early():
    stage = Stage(max_batched_tokens=3, pool=400)
    stage.submit(1, prompt=300)
    stage.submit(2, prompt=300, timeout_s=0.2)
    assert (stage.ended(2).outcome, stage.ended(2).status) == ("rejected", 503)


# --- readiness


@pytest.mark.parametrize(
    ("setting", "ready"),
    [
        ({"prefill": 1, "decode": 1}, True),
        ({"prefill": 0}, False),
        ({"decode": 0}, False),
        ({"prefill": 0, "on_empty_pool": "local"}, True),
        ({"prefill": 0, "on_empty_pool": "queue"}, False),
        ({"prefill": 0, "disaggregate": "never"}, True),
        ({"prefill": 0, "is_colocated": True}, True),
    ],
)
def test_ready_means_that_a_new_request_would_be_served(setting, ready):
    is_ready, detail = Stage(**setting).machine.readiness(0.0)
    assert is_ready is ready and bool(detail["reason"]) is not ready


def test_lands_carry_everything_a_worker_needs():
    stage = Stage()
    stage.submit(salt="s", priority=3, temperature=0.5)
    land: Land = stage.land()
    assert (land.salt, land.priority, land.sampling.temperature, land.num_prompt) == ("s", 3, 0.5, 6)
