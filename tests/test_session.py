from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.session import ACK_AFTER_S, RESEND_AFTER_S, Session


def test_a_payload_is_delivered_once_and_then_forgotten():
    a, b = Session(), Session()
    frame = a.send(b"x", 0.0)
    assert b.receive(frame, 0.0) == b"x"
    assert b.receive(frame, 0.0) is None
    [ack] = b.due(ACK_AFTER_S)
    assert a.receive(ack, 1.0) is None
    assert a.num_unacked == 0
    assert a.next_due_s() is None


def test_a_lost_payload_is_sent_again_after_a_while_and_only_then():
    a, b = Session(), Session()
    a.send(b"x", 0.0)
    assert a.due(RESEND_AFTER_S / 2) == []
    [again] = a.due(RESEND_AFTER_S)
    assert b.receive(again, 1.0) == b"x"


def test_what_lies_beyond_a_gap_waits_for_the_gap():
    a, b = Session(), Session()
    first, second = a.send(b"1", 0.0), a.send(b"2", 0.0)
    assert b.receive(second, 0.0) is None
    assert b.receive(first, 0.0) == b"1"
    again = a.due(RESEND_AFTER_S)
    assert [b.receive(frame, 1.0) for frame in again] == [None, b"2"]


def test_a_full_window_refuses_and_keeps_nothing():
    a = Session(window=2)
    assert a.send(b"1", 0.0) and a.send(b"2", 0.0)
    assert a.send(b"3", 0.0) is None
    assert a.num_unacked == 2


def test_the_byte_window_lets_one_large_payload_through():
    a = Session(window_bytes=10)
    assert a.send(b"x" * 100, 0.0) is not None
    assert a.send(b"y", 0.0) is None


def test_a_blocked_socket_is_tried_again_soon():
    a = Session()
    a.send(b"1", 0.0)
    a.blocked(0.0)
    assert len(a.due(0.05)) == 1


def test_an_acknowledgement_of_what_was_never_sent_changes_nothing():
    a, b = Session(), Session()
    for payload in (b"1", b"2"):
        b.receive(a.send(payload, 0.0), 0.0)
    [ack] = b.due(1.0)
    fresh = Session()
    fresh.send(b"only", 0.0)
    fresh.receive(ack, 0.0)
    assert fresh.num_unacked == 1


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["a sends", "b sends", "deliver", "drop", "repeat", "swap", "time"]), max_size=80))
def test_all_payloads_arrive_once_and_in_order_whatever_the_wire_does(script):
    a, b = Session(), Session()
    sides, wires = {"a": a, "b": b}, {"a": [], "b": []}
    sent, got = {"a": [], "b": []}, {"a": [], "b": []}
    now_s = 0.0

    def deliver(to):
        if wires[to]:
            payload = sides[to].receive(wires[to].pop(0), now_s)
            if payload is not None:
                got[to].append(payload)

    for number, move in enumerate(script * 2):
        side, other = ("a", "b") if number % 2 else ("b", "a")
        if "sends" in move:
            side, other = ("a", "b") if move[0] == "a" else ("b", "a")
            payload = str(number).encode()
            sent[other].append(payload)
            wires[other].append(sides[side].send(payload, now_s))
        elif move == "deliver":
            deliver(side)
        elif move == "drop":
            wires[side][:1] = []
        elif move == "repeat":
            wires[side][:1] = wires[side][:1] * 2
        elif move == "swap":
            wires[side][:2] = wires[side][:2][::-1]
        else:
            now_s += 0.6
            for me, peer in (("a", "b"), ("b", "a")):
                wires[peer].extend(sides[me].due(now_s))
    for _ in range(100):
        now_s += RESEND_AFTER_S
        for me, peer in (("a", "b"), ("b", "a")):
            wires[peer].extend(sides[me].due(now_s))
            while wires[peer]:
                deliver(peer)
    assert got == sent
    assert a.num_unacked == b.num_unacked == 0


def drive(sender, receiver, now_s):
    """One turn of a perfect wire; the payloads that arrived."""
    arrived = [payload for frame in sender.due(now_s) if (payload := receiver.receive(frame, now_s)) is not None]
    for frame in receiver.due(now_s):
        sender.receive(frame, now_s)
    return len(arrived)


def test_a_stream_catches_up_with_one_lost_frame_at_the_speed_of_the_wire():
    sender, receiver, arrived = Session(), Session(), 0
    for turn in range(2000):
        now_s = turn * 0.005
        frame = sender.send(b"x", now_s)
        arrived += turn != 100 and receiver.receive(frame, now_s) is not None
        arrived += drive(sender, receiver, now_s)
    assert arrived == 2000


def test_what_was_sent_before_the_peer_was_there_arrives_as_fast_as_it_is_acknowledged():
    sender, receiver, arrived = Session(), Session(), 0
    for _ in range(500):
        sender.send(b"x", 0.0)
        sender.blocked(0.0)
    for turn in range(60):
        arrived += drive(sender, receiver, 0.02 + turn * 0.005)
    assert arrived == 500
