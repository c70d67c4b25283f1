import pytest

from coordinator.liveness import Liveness
from pdserve.messages import Counts, Heartbeat


def heartbeat(epoch="e", *, sent_s=0.0, deadline_s=100.0):
    return Heartbeat(
        worker="w",
        epoch=epoch,
        sent_ns=int(sent_s * 1e9),
        step=1,
        deadline_ns=int(deadline_s * 1e9),
        phase="serving",
        held=(),
        leases=(),
        counts=Counts(free=0, cached=0, held=0, landing=0, draining=0),
        num_running=0,
        metrics=(),
    )


@pytest.fixture
def liveness():
    liveness = Liveness(heartbeat_timeout_s=2.0)
    liveness.register("e", 0.0)
    return liveness


def test_a_worker_that_speaks_is_not_suspect(liveness):
    liveness.heard(heartbeat(), 1.5)
    assert liveness.suspects(3.4) == []


def test_a_silent_worker_is_suspect_once(liveness):
    assert liveness.suspects(2.1) == [("e", "silent for 2.1 s")]
    assert liveness.suspects(9.0) == []


def test_a_worker_that_speaks_but_hangs_in_its_loop_is_suspect(liveness):
    liveness.heard(heartbeat(sent_s=50.0, deadline_s=49.0), 1.0)
    assert liveness.suspects(1.0) == [("e", "its engine loop is 1.0 s past its deadline")]


def test_deadlines_are_compared_on_the_workers_own_clock(liveness):
    liveness.heard(heartbeat(sent_s=1000.0, deadline_s=1001.0), 0.0)
    assert liveness.suspects(0.9) == []
    assert [epoch for epoch, _ in liveness.suspects(1.5)] == ["e"]


def test_a_suspect_that_comes_back_is_a_stranger(liveness):
    liveness.suspects(3.0)
    assert not liveness.heard(heartbeat(), 3.1)
