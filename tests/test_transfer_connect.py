import dataclasses
import logging
import time

import pytest
import zmq
from transfer_kit import LAYOUT, finish, make_pool, peer_of, read_of

from kv_transfer.connect import RETRY_S, Connector, connect
from kv_transfer.offers import export_pool, openers
from pdserve.messages import LinkOffer


class World:
    def __init__(self, folder):
        self.folder = folder
        self.context = zmq.Context()
        self.local, self.owner = make_pool(), make_pool()
        self.exports = export_pool(self.owner, kinds="auto", folder=folder / "run")
        self.peer = peer_of(self.owner, self.exports.offers)

    def openers(self, kinds="auto"):
        return openers(self.local, kinds=kinds, context=self.context, slice_s=0.002)

    def connect(self, peer, kinds="auto"):
        return connect(peer, self.local, LAYOUT, self.openers(kinds))

    def close(self):
        self.exports.close()
        self.context.term()
        self.local.close()
        self.owner.close()


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    yield world
    world.close()


@pytest.fixture
def connector(world):
    connector = Connector(pool=world.local, layout=LAYOUT, openers=world.openers())
    yield connector
    connector.close()


def settle(connector, epoch, now_s=0.0, is_over=lambda connector, epoch: connector.problem(epoch) != "opening"):
    """Wait for the opening thread; the reader, or None when there will be none."""
    end_s = time.monotonic() + 10
    while time.monotonic() < end_s:
        reader = connector.reader(epoch, now_s)
        if reader is not None or is_over(connector, epoch):
            return reader
        time.sleep(0.001)
    raise AssertionError("still opening")


def never(connector, epoch):
    """Keep trying: an earlier failure is still shown."""
    return False


BROKEN_SHM = LinkOffer(kind="shm", address="/nowhere/kv.sock")


def test_the_first_offer_that_works_is_taken_and_measured(world):
    contact = world.connect(world.peer)
    assert (contact.reader.kind, contact.problem) == ("shm", "")
    assert contact.test.bytes_per_s > 0
    contact.reader.close()


def test_a_fallback_is_said_aloud(world, caplog):
    peer = dataclasses.replace(world.peer, links=(BROKEN_SHM, world.peer.links[1]))
    with caplog.at_level(logging.WARNING):
        contact = world.connect(peer)
    assert contact.reader.kind == "tcp"
    assert "falls back to tcp: shm: /nowhere/kv.sock does not answer" in caplog.text
    contact.reader.close()


def test_a_link_asked_for_by_name_has_no_fallback(world):
    peer = dataclasses.replace(world.peer, links=(BROKEN_SHM, world.peer.links[1]))
    contact = world.connect(peer, kinds="shm")
    assert contact.reader is None
    assert "does not answer" in contact.problem


def test_a_peer_that_offers_another_link_is_named(world):
    contact = world.connect(dataclasses.replace(world.peer, links=world.peer.links[1:]), kinds="shm")
    assert contact.problem == "it offers tcp, wanted is shm"


@pytest.mark.parametrize(("field", "value"), [("block_size", 64), ("dtype", "bfloat16"), ("model", "other")])
def test_a_pool_of_another_layout_is_refused_before_anything_is_read(world, field, value):
    contact = world.connect(dataclasses.replace(world.peer, layout=dataclasses.replace(LAYOUT, **{field: value})))
    assert contact.reader is None
    assert f"{field} differs" in contact.problem


def test_a_link_that_delivers_other_bytes_is_not_used(world):
    world.owner.bytes_of(world.owner.test_blocks.start)[:] = 0
    contact = world.connect(world.peer)
    assert contact.reader is None
    assert "other bytes" in contact.problem


def test_peers_of_the_roster_are_opened_in_the_background(world, connector):
    connector.update([world.peer], 0.0)
    reader = settle(connector, world.peer.epoch)
    reader.start(read_of(world.owner, [3], [20]))
    assert [result.ok for result in finish(reader)] == [True]
    assert [contact.peer.name for contact in connector.contacts()] == ["owner"]


def test_a_peer_that_leaves_the_roster_is_let_go(world, connector):
    connector.update([world.peer], 0.0)
    reader = settle(connector, world.peer.epoch)
    reader.start(read_of(world.owner, [3], [20], "r"))
    connector.update([], 1.0)
    assert reader.is_broken
    assert reader.is_quiescent("r")
    assert (connector.reader(world.peer.epoch, 1.0), connector.contacts()) == (None, [])
    assert connector.problem(world.peer.epoch) == "not in the roster"


def test_a_peer_that_cannot_be_reached_is_tried_again_later_not_at_once(world, connector):
    broken = dataclasses.replace(world.peer, links=(BROKEN_SHM,))
    connector.update([broken], 0.0)
    assert settle(connector, broken.epoch) is None
    connector.update([world.peer], RETRY_S / 2)
    assert connector.reader(world.peer.epoch, RETRY_S / 2) is None
    assert "does not answer" in connector.problem(world.peer.epoch)
    assert settle(connector, world.peer.epoch, 2 * RETRY_S, never) is not None


def test_a_broken_reader_gives_its_results_and_is_then_replaced(world, connector):
    peer = dataclasses.replace(world.peer, links=world.peer.links[1:])
    connector.update([peer], 0.0)
    reader = settle(connector, peer.epoch)
    world.exports.close()
    reader.start(read_of(world.owner, [3], [20]))
    assert [result.reason for result in finish(reader)] == ["peer_gone"]
    assert connector.reader(peer.epoch, 1.0) is None
    world.exports = export_pool(world.owner, kinds="auto", folder=world.folder / "run")
    connector.update([dataclasses.replace(peer, links=world.exports.offers)], 1.0)
    assert settle(connector, peer.epoch, 10.0, never) is not None
