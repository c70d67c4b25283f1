import time

import msgpack
import pytest
import zmq

from pdserve.channel import Hub, Link, RawLink, new_epoch
from pdserve.messages import Ping, Pong


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def until(condition, *, pump=(), seconds=10.0):
    """Run both ends until `condition()` is true; the bound is only against hanging."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "gave up waiting"
        for side in pump:
            side.tick()
        time.sleep(0.002)


def collect(hub, into):
    into.extend(hub.receive())
    return into


def test_messages_go_both_ways_and_are_acknowledged(context):
    hub = Hub(context, "tcp://127.0.0.1:*", new_epoch())
    link = Link(context, hub.endpoint, new_epoch())
    link.send(Ping(nonce=1))
    got = []
    until(lambda: collect(hub, got), pump=[link])
    assert got == [(link.epoch, Ping(nonce=1), None)]
    assert hub.send(link.epoch, Pong(nonce=1))
    back = []
    until(lambda: back.extend(link.receive()) or back, pump=[hub, link])
    assert back == [Pong(nonce=1)]
    assert link.remote == hub.epoch


def test_a_peer_that_was_declared_dead_is_answered_with_a_reset(context):
    hub = Hub(context, "tcp://127.0.0.1:*", new_epoch())
    link = Link(context, hub.endpoint, new_epoch())
    link.send(Ping(nonce=1))
    got = []
    until(lambda: collect(hub, got), pump=[link])
    hub.forget(link.epoch)
    assert not hub.send(link.epoch, Pong(nonce=1))
    link.send(Ping(nonce=2))
    until(lambda: (hub.receive(), link.receive(), link.is_stale)[-1], pump=[link])
    assert not link.send(Ping(nonce=3))


def test_a_link_notices_that_the_hub_was_replaced(context, tmp_path):
    endpoint = f"ipc://{tmp_path}/hub"
    hub = Hub(context, endpoint, new_epoch())
    link = Link(context, endpoint, new_epoch())
    link.send(Ping(nonce=1))
    got = []
    until(lambda: collect(hub, got), pump=[link])
    hub.send(link.epoch, Pong(nonce=1))
    until(lambda: link.receive(), pump=[hub])
    hub.close()
    second = Hub(context, endpoint, new_epoch())
    link.send(Ping(nonce=2))
    until(lambda: (second.receive(), link.receive(), link.is_stale)[-1], pump=[link])
    assert not link.send(Ping(nonce=3))


def test_what_is_sent_before_the_other_side_exists_arrives_when_it_does(context, tmp_path):
    link = Link(context, f"ipc://{tmp_path}/late", new_epoch())
    assert link.send(Ping(nonce=7))
    hub = Hub(context, f"ipc://{tmp_path}/late", new_epoch())
    got = []
    until(lambda: collect(hub, got), pump=[link])
    assert got[0][1] == Ping(nonce=7)


def test_raw_messages_come_with_their_sender(context):
    hub = Hub(context, "tcp://127.0.0.1:*", new_epoch())
    raw = RawLink(context, hub.endpoint, "worker")
    got = []
    until(lambda: (raw.send(Ping(nonce=1)), collect(hub, got))[-1])
    source, message, identity = got[0]
    assert (source, message) == ("worker", Ping(nonce=1)) and identity is not None


@pytest.mark.parametrize(
    "parts",
    [
        [b""],
        [b"\x80\x04cos\nsystem\n(S'touch /tmp/x'\ntR."],
        [b"a", b"b", b"c"],
        [msgpack.packb([1, 0, "me", "", 1, 0]), b"not a message"],
        [msgpack.packb([99, 0, "me", "", 1, 0]), b""],
        [msgpack.packb([1, 0, "me", "", -1, 0]), b""],
        [msgpack.packb([1, 0, "someone else", "", 1, 0]), b""],
        [msgpack.packb({"a": 1}), b""],
    ],
)
def test_rubbish_on_the_socket_is_counted_and_nothing_happens(context, parts):
    hub = Hub(context, "tcp://127.0.0.1:*", new_epoch())
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, b"me")
    socket.connect(hub.endpoint)
    socket.send_multipart(parts)
    got = []
    until(lambda: collect(hub, got) or sum(hub.ignored.values()))
    assert got == []


def test_a_link_that_speaks_first_to_a_known_epoch_opens_a_session(context):
    hub = Hub(context, "tcp://127.0.0.1:*", new_epoch())
    link = Link(context, hub.endpoint, new_epoch(), remote=hub.epoch)
    link.tick()
    until(lambda: hub.receive() or hub.peers(), pump=[link])
    assert hub.send(link.epoch, Ping(nonce=1))
    got = []
    until(lambda: got.extend(link.receive()) or got, pump=[hub, link])
    assert got == [Ping(nonce=1)] and not link.is_stale
