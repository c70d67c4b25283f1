"""A decode worker's landings, with a real hub as the owner and a link that does what the test says."""

import time

import pytest
import zmq
from transfer_kit import LAYOUT

from decode_node.landings import LINK_PATIENCE_S, Landings
from decode_node.plan import LandingPlan
from kv_transfer.links import ReadResult
from pdserve.channel import Hub, new_epoch
from pdserve.messages import Key, PeerInfo, Published, ReleaseLease, Run

KEY = Key(request="r", attempt=1)


class Reader:
    """Finishes every read at the next poll."""

    waitable = None

    def __init__(self):
        self.num_bytes, self.reads = 0, []

    @property
    def num_pending(self):
        return len(self.reads)

    def start(self, read):
        self.reads.append(read)

    def poll(self, budget_s):
        done, self.reads = self.reads, []
        return [ReadResult(read_id=read.read_id, reason="", num_bytes=1, seconds=0.0) for read in done]


class Connector:
    def __init__(self):
        self.open = None

    def update(self, peers, now_s):
        self.peers = peers

    def reader(self, epoch, now_s):
        return self.open

    def contacts(self):
        return [type("Contact", (), {"peer": peer, "reader": self.open}) for peer in self.peers if self.open]

    def close(self):
        pass


class Owner:
    def __init__(self, folder):
        self.context = zmq.Context()
        self.hub = Hub(self.context, f"ipc://{folder}/hub", new_epoch())
        self.connector = Connector()
        self.landings = Landings(
            epoch="reader", context=self.context, connector=self.connector, block_bytes=LAYOUT.block_bytes
        )
        peer = PeerInfo(
            name="p",
            role="prefill",
            epoch=self.hub.epoch,
            endpoint=self.hub.endpoint,
            layout=LAYOUT,
            num_blocks=8,
            links=(),
        )
        self.landings.roster([peer], 0.0)
        self.heard = []

    def pump(self, now_s=0.0):
        self.landings.tick()
        self.hub.tick()
        self.heard += [message for _, message, _ in self.hub.receive()]
        return self.landings.advance(now_s, 0.001)

    def until(self, condition, now_s=0.0):
        end_s, outcomes = time.monotonic() + 10, []
        while not condition(outcomes):
            assert time.monotonic() < end_s, "gave up waiting"
            outcomes += self.pump(now_s)
            time.sleep(0.001)
        return outcomes

    def publish(self):
        self.landings.begin(LandingPlan(key=KEY, first_position=0, num_tokens=4, blocks=(1, 2)), self.hub.epoch, 4)
        run = Run(first_position=0, num_tokens=4, blocks=(3,), generations=(1,))
        assert self.hub.send("reader", Published(key=KEY, runs=(run,), is_last=True))


@pytest.fixture
def owner(tmp_path):
    owner = Owner(tmp_path)
    yield owner
    owner.landings.close()
    owner.hub.close()
    owner.context.destroy(linger=0)


def test_an_owner_that_is_spoken_to_before_it_knows_the_reader_gets_its_lease_back(owner):
    owner.until(lambda _: owner.hub.peers())
    owner.connector.open = Reader()
    owner.publish()
    (outcome,) = owner.until(lambda outcomes: outcomes)
    assert (outcome.key, outcome.reason) == (KEY, "")
    owner.until(lambda _: ReleaseLease(key=KEY) in owner.heard)


def test_a_read_that_starts_and_ends_in_one_turn_has_started_before(owner):
    owner.hub.expect("reader")
    owner.connector.open = Reader()
    before_ns = time.monotonic_ns()
    owner.publish()
    owner.until(lambda outcomes: outcomes)
    ((key, time_ns),) = owner.landings.take_started()
    assert key == KEY and before_ns <= time_ns <= time.monotonic_ns()


def test_a_link_that_is_being_opened_is_waited_for_and_not_for_ever(owner):
    owner.hub.expect("reader")
    owner.publish()
    owner.until(lambda _: owner.landings._waiting, 5.0)
    assert owner.pump(5.0 + LINK_PATIENCE_S - 0.1) == []
    (outcome,) = owner.pump(5.0 + LINK_PATIENCE_S)
    assert outcome.reason == "no_link"


def test_a_link_that_opens_in_time_is_used(owner):
    owner.hub.expect("reader")
    owner.publish()
    owner.until(lambda _: owner.landings._waiting, 5.0)
    owner.connector.open = Reader()
    (outcome,) = owner.until(lambda outcomes: outcomes, 5.5)
    assert outcome.reason == ""


def test_an_owner_that_takes_us_for_dead_ends_its_landings(owner):
    owner.hub.expect("reader")
    owner.connector.open = None
    owner.publish()
    owner.until(lambda _: owner.landings._waiting, 5.0)
    owner.hub.forget("reader")
    owner.landings.renew(5.0)
    (outcome,) = owner.until(lambda outcomes: outcomes, 5.0)
    assert outcome.reason == "owner_lost"
