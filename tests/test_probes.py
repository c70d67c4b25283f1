import json

from coordinator.probes import DEADLINE_S, Probes
from pdserve.messages import Ping

READY = (True, {"ready": True, "reason": ""})


def test_a_probe_is_answered_once_every_loop_has_answered():
    probes = Probes()
    assert probes.begin("f", 7, ["p", "d"], READY, 0.0) is None
    assert probes.pings() == [("p", Ping(nonce=1)), ("d", Ping(nonce=1))]
    assert probes.pong("p", 1) is None
    asker, reply = probes.pong("d", 1)
    assert (asker, reply.nonce, reply.is_ready) == ("f", 7, True)
    assert probes.overdue(99.0) == []


def test_a_loop_that_does_not_answer_makes_it_not_ready():
    probes = Probes()
    probes.begin("f", 7, ["p", "d"], READY, 0.0)
    probes.pong("p", 1)
    assert probes.overdue(DEADLINE_S / 2) == []
    [(_, reply)] = probes.overdue(DEADLINE_S)
    assert not reply.is_ready and json.loads(reply.detail)["reason"] == "an engine loop does not answer"
    assert probes.pong("d", 1) is None


def test_what_is_not_ready_is_said_without_asking_anybody():
    probes = Probes()
    _, reply = probes.begin("f", 7, [], (False, {"reason": "no decode worker is alive"}), 0.0)
    assert not reply.is_ready and probes.pings() == []
