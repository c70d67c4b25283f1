import signal

import pytest

from coordinator.fleet import Fleet


class FakeProcess:
    def __init__(self, pid):
        self.pid = pid
        self.code = None
        self.signals = []

    def poll(self):
        return self.code

    def send_signal(self, number):
        self.signals.append(number)


@pytest.fixture
def started():
    return []


@pytest.fixture
def fleet(started):
    def build(kind, name):
        def start():
            started.append((name, FakeProcess(len(started) + 1)))
            return started[-1][1]

        return start

    return Fleet(build)


def names(started):
    return [name for name, _ in started]


def test_scaling_up_starts_what_is_missing_and_nothing_else(fleet, started):
    assert fleet.scale("prefill", 2, 0.0) == []
    fleet.scale("prefill", 2, 1.0)
    assert names(started) == ["prefill-0", "prefill-1"]


def test_scaling_down_asks_the_youngest_to_leave_and_does_not_replace_it(fleet, started):
    fleet.scale("decode", 1, 0.0)
    fleet.scale("decode", 2, 1.0)
    [leaving] = fleet.scale("decode", 1, 2.0)
    assert leaving.name == "decode-1"
    started[1][1].code = 0
    fleet.tick(3.0)
    assert list(fleet.members) == ["decode-0"]
    assert len(started) == 2


def test_a_worker_that_is_killed_is_replaced_at_once_under_its_name(fleet, started):
    fleet.scale("prefill", 1, 0.0)
    started[0][1].code = -signal.SIGKILL
    [ended] = fleet.tick(100.0)
    assert ended.reason == "killed by SIGKILL"
    assert names(started) == ["prefill-0", "prefill-0"]


def test_a_worker_that_keeps_dying_at_start_is_started_ever_more_slowly(fleet, started):
    fleet.scale("prefill", 1, 0.0)
    times = []
    now_s = 0.0
    while len(started) < 6 and now_s < 100:
        if fleet.members["prefill-0"].process is not None:
            times.append(now_s)
            started[-1][1].code = 1
        fleet.tick(now_s)
        now_s += 0.5
    gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    assert gaps == sorted(gaps) and gaps[-1] >= 4


def test_a_suspect_is_killed_after_its_time_unless_it_recovers(fleet, started):
    fleet.scale("prefill", 2, 0.0)
    fleet.suspect("prefill-0", 10.0)
    fleet.suspect("prefill-1", 10.0)
    fleet.recovered("prefill-1")
    fleet.tick(9.9)
    assert started[0][1].signals == []
    fleet.tick(10.0)
    assert started[0][1].signals == [signal.SIGKILL]
    assert started[1][1].signals == []


def test_nothing_is_started_again_once_the_fleet_stops(fleet, started):
    fleet.scale("prefill", 1, 0.0)
    fleet.stop_restarting()
    started[0][1].code = 0
    fleet.tick(1.0)
    assert fleet.members == {} and len(started) == 1


def test_scaling_down_a_worker_that_waits_for_its_restart_forgets_it(fleet, started):
    fleet.scale("prefill", 1, 0.0)
    for _ in range(2):
        started[-1][1].code = 1
        fleet.tick(0.1)
    assert fleet.members["prefill-0"].process is None
    assert fleet.scale("prefill", 0, 0.2) == []
    assert fleet.members == {}


def test_a_worker_that_waits_for_its_restart_is_not_started_by_a_fleet_that_stops(fleet, started):
    fleet.scale("decode", 1, 0.0)
    for now_s in (0.1, 0.2):
        started[-1][1].code = 1
        fleet.tick(now_s)
    count = len(started)
    fleet.stop_restarting()
    fleet.tick(5.0)
    assert len(started) == count


def test_a_worker_that_was_told_to_leave_while_it_loads_is_known_to(fleet):
    fleet.scale("decode", 2, 0.0)
    (leaving,) = fleet.scale("decode", 1, 0.1)
    assert fleet.is_leaving(leaving.name)
    assert [member.name for member in fleet.of("decode") if not fleet.is_leaving(member.name)] != [leaving.name]
