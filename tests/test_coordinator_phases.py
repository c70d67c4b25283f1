"""A request's clock: where its time went."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.phases import Clock
from pdserve.phases import PHASES, WORKER_STAMPS

MS = 1_000_000


def placed_clock() -> Clock:
    clock = Clock(0)
    clock.admitted(1 * MS)
    clock.placed(3 * MS)
    return clock


def spent_ms(clock: Clock, finished_ms: int) -> dict[str, int]:
    return {phase: spent // MS for phase, spent in clock.finish(finished_ms * MS) if spent}


def test_a_handed_over_request_spends_its_time_in_nine_phases():
    clock = placed_clock()
    for name, time_ms in [("prefill_started", 6), ("first_token_ready", 10)]:
        clock.stamp(name, time_ms * MS, 100 * MS)
    clock.sent_first(15 * MS)
    clock.accepted(15 * MS)
    for name, time_ms in [("joined", 21), ("decode_started", 28), ("second_token", 36)]:
        clock.stamp(name, time_ms * MS, 100 * MS)
    assert spent_ms(clock, 45) == {
        "admission": 1,
        "queue": 2,
        "prefill_wait": 3,
        "prefill": 4,
        "first_send": 5,
        "handoff_tail": 6,
        "decode_wait": 7,
        "first_decode": 8,
        "decode": 9,
    }


def test_a_request_that_ends_early_spent_the_rest_where_it_was():
    assert spent_ms(placed_clock(), 9)["prefill_wait"] == 6
    waiting = Clock(0)
    waiting.admitted(1 * MS)
    assert spent_ms(waiting, 5) == {"admission": 1, "queue": 4}


def test_a_failed_attempt_without_a_token_is_lost_from_its_placement_on():
    clock = placed_clock()
    clock.stamp("prefill_started", 5 * MS, 5 * MS)
    clock.lose(13 * MS)
    clock.placed(14 * MS)
    clock.stamp("prefill_started", 16 * MS, 16 * MS)
    assert spent_ms(clock, 20) == {"admission": 1, "queue": 3, "lost": 10, "prefill_wait": 2, "prefill": 4}


def test_a_pause_in_a_stream_is_lost_from_one_token_to_the_next():
    clock = placed_clock()
    clock.stamp("first_token_ready", 5 * MS, 5 * MS)
    clock.sent_first(5 * MS)
    clock.accepted(5 * MS)
    clock.stamp("decode_started", 6 * MS, 6 * MS)
    clock.stamp("second_token", 9 * MS, 9 * MS)  # never arrived
    clock.accepted(8 * MS)
    clock.lose(10 * MS)
    clock.placed(12 * MS)
    clock.accepted(20 * MS)
    spent = spent_ms(clock, 23)
    assert (spent["lost"], spent["first_decode"], spent["decode"], sum(spent.values())) == (12, 2, 3, 23)


def test_overlap_is_the_share_of_the_transfer_before_the_first_token():
    clock = placed_clock()
    for name, time_ms in [("transfer_started", 10), ("first_token_ready", 16), ("transfer_done", 18)]:
        clock.stamp(name, time_ms * MS, 100 * MS)
    assert (clock.transfer_ns, clock.transfer_overlap) == (8 * MS, 0.75)


def test_without_a_transfer_there_is_no_overlap():
    assert (placed_clock().transfer_ns, placed_clock().transfer_overlap) == (0, 0.0)


def test_a_stamp_from_the_future_is_clamped_and_counted():
    clock = placed_clock()
    clock.stamp("prefill_started", 50 * MS, 5 * MS)
    assert clock.num_clamped == 1 and spent_ms(clock, 6)["prefill_wait"] == 2


events = st.one_of(
    st.tuples(st.sampled_from(WORKER_STAMPS), st.integers(-50, 200)),
    st.tuples(st.sampled_from(["placed", "accepted", "sent_first", "lose"]), st.just(0)),
)


@given(st.lists(events, max_size=30), st.lists(st.integers(0, 9), min_size=31, max_size=31))
def test_phases_sum_to_what_the_client_saw_whatever_the_stamps_say(steps, gaps):
    now = 5
    clock = Clock(3)
    clock.admitted(now)
    for (name, time), gap in zip(steps, gaps, strict=False):
        now += gap
        if name in WORKER_STAMPS:
            clock.stamp(name, time, now)
        else:
            getattr(clock, name)(now)
    now += gaps[-1]
    spent = clock.finish(now)
    assert [phase for phase, _ in spent] == list(PHASES)
    assert all(each >= 0 for _, each in spent) and sum(each for _, each in spent) == now - 3
    assert 0 <= clock.transfer_overlap <= 1 and clock.transfer_ns >= 0
