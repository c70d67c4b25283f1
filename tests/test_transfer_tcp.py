import socket
import threading

import msgpack
import pytest
import zmq
from transfer_kit import content, fill, finish, linked, make_pool, peer_of, read_of

from kv_transfer.links import BlockRead
from kv_transfer.offers import export_pool
from kv_transfer.tcp import (
    MAX_REQUEST_BYTES,
    REGISTRY,
    SLICE_BYTES,
    WINDOW,
    Ask,
    Head,
    TcpExport,
    Trailer,
    slice_blocks,
)
from kv_transfer.tcp_reader import TcpReader
from pdserve.errors import ConfigError
from pdserve.messages import LinkOffer


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def pair(tmp_path):
    with linked("tcp", tmp_path) as pair:
        yield pair


class FakeOwner:
    """A ROUTER that answers what a test wants, and a reader with a clock of its own that believes it."""

    def __init__(self, context):
        self.router = context.socket(zmq.ROUTER)
        self.router.bind("tcp://127.0.0.1:*")
        self.pool = make_pool()
        self.now_s = 0.0
        offer = LinkOffer(kind="tcp", address=self.router.getsockopt_string(zmq.LAST_ENDPOINT))
        peer = peer_of(self.pool, [offer])
        self.reader = TcpReader(self.pool, offer=offer, peer=peer, context=context, clock=lambda: self.now_s)

    def start(self, sources=(3, 4), name="read"):
        """Read each block to where it came from; destinations first hold zeros."""
        sources = tuple(sources)
        self.reader.start(
            BlockRead(read_id=name, sources=sources, generations=(1,) * len(sources), destinations=sources)
        )

    def asked(self):
        """The next request."""
        assert self.router.poll(5000)
        self.identity, body = self.router.recv_multipart()
        return REGISTRY.decode(body)

    def answer(self, *frames):
        self.router.send_multipart([self.identity, *frames])

    def answer_well(self, ask, value=7, reason=""):
        payload = bytes([value]) * (len(ask.blocks) * self.pool.block_bytes)
        self.answer(head(ask), payload, trailer(ask, reason))

    def finish(self):
        return finish(self.reader)

    def wait(self):
        """Poll until something has arrived."""
        assert self.reader.waitable.poll(5000)
        return self.reader.poll(0.0)


def head(ask, reason=""):
    return REGISTRY.encode(Head(slice_id=ask.slice_id, reason=reason))


def trailer(ask, reason=""):
    return REGISTRY.encode(Trailer(slice_id=ask.slice_id, reason=reason))


@pytest.fixture
def fake(context):
    fake = FakeOwner(context)
    yield fake
    fake.reader.close()
    fake.pool.close()


# the owner


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\x80\x04\x95."],
        [bytes(range(200))],
        [b"", b""],
        [msgpack.packb([1, [1, "e", [1], [1]]]), b"more"],
        [msgpack.packb([2, [1, ""]])],
        [msgpack.packb([1, [-1, "e", [1], [1]]])],
        [msgpack.packb([1, [1, "e", [1, 2], [1]]])],
        [msgpack.packb([1, [1, "e", [], []]])],
        [msgpack.packb([1, [1, "e", [0], [1]]])],
        [msgpack.packb([1, [1, "e", [10**9], [1]]])],
        [msgpack.packb([1, [1, "e", [-5], [1]]])],
        [msgpack.packb([1, [1, "e", [1], [-1]]])],
        [msgpack.packb([1, [1, "e", [1] * 1025, [1] * 1025]])],
        [b"\xdd\xff\xff\xff\xff"],
        [b"\x92\x01\xc6\xff\xff\xff\xff"],
    ],
    ids=lambda frames: repr(frames)[:40],
)
def test_nonsense_is_counted_unanswered_and_harms_no_reader(pair, context, frames):
    stranger = context.socket(zmq.DEALER)
    stranger.connect(pair.peer.links[0].address)
    stranger.send_multipart([*frames])
    stranger.send(REGISTRY.encode(Ask(slice_id=5, epoch=pair.peer.epoch, blocks=(1,), generations=(1,))))
    answer = stranger.recv_multipart()
    assert REGISTRY.decode(answer[0]) == Head(slice_id=5, reason="")
    assert pair.exports.num_ignored == 1
    fill(pair.owner, 3)
    pair.read([3], [20])
    assert content(pair.local, 20) == 3


def test_random_bytes_on_the_port_harm_no_reader(pair):
    port = int(pair.peer.links[0].address.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(bytes(range(256)) * 16)
        (result,) = pair.read([3], [20])
    assert result.ok


def test_a_request_larger_than_any_sound_one_ends_its_sender_only(pair, context):
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.RECONNECT_IVL, -1)
    stranger.connect(pair.peer.links[0].address)
    stranger.send(b"x" * (MAX_REQUEST_BYTES + 1))
    (result,) = pair.read([3], [20])
    assert result.ok


def test_a_stale_block_is_refused_before_it_is_sent(pair, context):
    asker = context.socket(zmq.DEALER)
    asker.connect(pair.peer.links[0].address)
    asker.send(REGISTRY.encode(Ask(slice_id=1, epoch=pair.peer.epoch, blocks=(1,), generations=(9,))))
    assert [REGISTRY.decode(frame) for frame in asker.recv_multipart()] == [Head(slice_id=1, reason="stale_generation")]


def test_an_address_that_cannot_be_bound_is_a_configuration_error(context):
    pool = make_pool()
    with pytest.raises(ConfigError, match="cannot serve KV blocks on tcp://203.0.113.1:9"):
        TcpExport(pool, context=context, bind="tcp://203.0.113.1:9")
    pool.close()


def test_the_address_offered_can_name_another_host(context):
    pool = make_pool()
    export = TcpExport(pool, context=context, bind="tcp://127.0.0.1:*", advertise_host="node7")
    assert export.offer.address.startswith("tcp://node7:")
    export.close()
    export.close()
    pool.close()


# the reader


def test_no_more_requests_are_in_flight_than_the_window_allows(fake):
    for name in range(WINDOW + 3):
        fake.start([name + 1], name)
    asks = [fake.asked() for _ in range(WINDOW)]
    assert not fake.router.poll(50)
    fake.answer_well(asks[0])
    assert [result.ok for result in fake.wait()] == [True]
    assert fake.asked().blocks == (WINDOW + 1,)


def test_a_silent_owner_fails_what_is_pending_and_breaks_the_link(fake):
    fake.start([3], "asked")
    fake.asked()
    fake.now_s = 5.1
    assert [(result.read_id, result.reason) for result in fake.reader.poll(0.0)] == [("asked", "timeout")]
    assert fake.reader.is_broken
    fake.start([4], "later")
    assert [result.reason for result in fake.reader.poll(0.0)] == ["timeout"]


def test_silence_is_counted_from_the_first_request_in_flight(fake):
    fake.now_s = 100.0
    fake.start()
    fake.now_s = 104.0
    assert fake.reader.poll(0.0) == []
    fake.answer_well(fake.asked())
    assert [result.ok for result in fake.finish()] == [True]


def test_bytes_that_come_after_the_read_was_abandoned_are_dropped(fake):
    fake.start([3, 4])
    ask = fake.asked()
    fake.reader.abandon("read")
    fake.answer_well(ask)
    assert fake.wait() == []
    assert content(fake.pool, 3) == 0


def test_bytes_that_turned_stale_while_leaving_are_not_written(fake):
    fake.start([3, 4])
    fake.answer_well(fake.asked(), reason="stale_generation")
    assert [result.reason for result in fake.finish()] == ["stale_generation"]
    assert content(fake.pool, 3) == 0


@pytest.mark.parametrize("name", ["short", "long", "two frames", "no payload", "other trailer", "no trailer"])
def test_a_reply_of_another_shape_than_asked_for_is_not_written(fake, name):
    fake.start([3, 4])
    ask = fake.asked()
    block = b"x" * fake.pool.block_bytes
    frames = {
        "short": [head(ask), block, trailer(ask)],
        "long": [head(ask), block * 3, trailer(ask)],
        "two frames": [head(ask), block, block, trailer(ask)],
        "no payload": [head(ask), trailer(ask)],
        "other trailer": [head(ask), block * 2, REGISTRY.encode(Trailer(slice_id=ask.slice_id + 1, reason=""))],
        "no trailer": [head(ask), block * 2, head(ask)],
    }
    fake.answer(*frames[name])
    assert [result.reason for result in fake.finish()] == ["malformed_reply"]
    assert content(fake.pool, 3) == 0


@pytest.mark.parametrize(
    "frames", [[b""], [b"\x80\x04."], [REGISTRY.encode(Head(slice_id=99, reason=""))], [b"x", b"y"]]
)
def test_a_reply_to_nothing_is_ignored(fake, frames):
    fake.start([3])
    ask = fake.asked()
    fake.answer(*frames)
    fake.answer_well(ask)
    assert [result.ok for result in fake.finish()] == [True]


def test_an_answer_given_twice_counts_once(fake):
    fake.start([3])
    ask = fake.asked()
    fake.answer_well(ask, value=7)
    fake.answer_well(ask, value=8)
    fake.start([4], "next")
    fake.answer_well(fake.asked(), value=9)
    assert [result.ok for result in fake.finish()] == [True, True]
    assert (content(fake.pool, 3), content(fake.pool, 4)) == (7, 9)


def test_a_reply_larger_than_any_sound_one_breaks_the_link(fake):
    fake.start([3])
    ask = fake.asked()
    fake.answer(head(ask), b"x" * (SLICE_BYTES * 2), trailer(ask))
    assert [result.reason for result in fake.finish()] == ["peer_gone"]


def test_an_owner_that_closes_is_noticed_without_waiting_for_silence(fake):
    fake.start([3])
    fake.asked()
    fake.router.close(linger=0)
    assert [result.reason for result in fake.finish()] == ["peer_gone"]
    assert fake.reader.is_broken


def test_an_owner_that_is_not_there_fails_the_first_read(context):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        offer = LinkOffer(kind="tcp", address=f"tcp://127.0.0.1:{unused.getsockname()[1]}")
        pool = make_pool()
        reader = TcpReader(pool, offer=offer, peer=peer_of(pool, [offer]), context=context)
        reader.start(read_of(pool, [3], [20]))
        assert [result.reason for result in finish(reader)] == ["peer_gone"]
        reader.close()
        pool.close()


def test_a_long_read_is_cut_into_slices_of_bounded_size(tmp_path):
    assert slice_blocks(64) == 1024
    assert slice_blocks(SLICE_BYTES // 3) == 3
    assert slice_blocks(10 * SLICE_BYTES) == 1


def test_both_links_are_offered_shared_memory_first(tmp_path):
    pool = make_pool()
    exports = export_pool(pool, kinds="auto", folder=tmp_path / "run")
    assert [offer.kind for offer in exports.offers] == ["shm", "tcp"]
    exports.close()
    pool.close()


def test_a_pool_that_nobody_reads_is_offered_on_no_link(tmp_path):
    pool = make_pool()
    before = threading.active_count()
    exports = export_pool(pool, kinds="none", folder=tmp_path / "run")
    assert exports.offers == () and threading.active_count() == before
    exports.close()
    pool.close()
