"""Two real processes: what an owner's death, stop or second life does to a reader."""

import os
import signal

import pytest
import zmq
from transfer_kit import content, finish

from kv_transfer.links import BlockRead
from kv_transfer.offers import openers
from kv_transfer.pool import Pool
from kv_transfer.selftest import describe, self_test
from kv_transfer.stand_in import StandIn
from pdserve.channel import new_epoch
from pdserve.errors import TransferError
from pdserve.layout import KVLayout

LAYOUT = KVLayout(model="m", dtype="float32", num_layers=8, num_kv_heads=4, head_dim=64, block_size=16)  # 256 KiB
NUM_BLOCKS = 40
EVERY = range(1, NUM_BLOCKS)


class Between:
    """A pool of this process, and a reader of another process's."""

    def __init__(self, kind, folder, shared):
        self.context = zmq.Context()
        self.local = Pool(num_blocks=NUM_BLOCKS, block_bytes=LAYOUT.block_bytes, epoch=new_epoch())
        self.owner = StandIn(kind, folder, layout=LAYOUT, num_blocks=NUM_BLOCKS, shared=shared)
        opener = openers(self.local, kinds=kind, context=self.context, slice_s=1e-5)[kind]
        self.open = lambda: opener(self.owner.peer.links[0], self.owner.peer)
        self.reader = self.open()

    def start(self, blocks=EVERY, name="read"):
        generations = tuple(int(self.owner.say(f"generation {block}")) for block in blocks)
        self.reader.start(
            BlockRead(read_id=name, sources=tuple(blocks), generations=generations, destinations=tuple(blocks))
        )

    def close(self):
        self.reader.close()
        self.owner.close()
        self.context.term()
        self.local.close()


@pytest.fixture(params=["shm", "memfd", "tcp"])
def between(request, tmp_path):
    between = Between("tcp" if request.param == "tcp" else "shm", tmp_path / "run", request.param == "memfd")
    yield between
    between.close()


def test_a_long_read_arrives_whole_and_in_order(between):
    for block in EVERY:
        between.owner.say(f"fill {block} {block}")
    between.start()
    (result,) = finish(between.reader)
    assert result.ok
    assert [content(between.local, block) for block in EVERY] == list(EVERY)


def test_an_owner_killed_half_way_is_gone_and_never_a_finished_read(between):
    between.start()
    between.reader.poll(0.0)
    between.owner.process.kill()
    between.owner.process.wait()
    (result,) = finish(between.reader)
    assert result.reason == "peer_gone"
    assert between.reader.is_broken
    with pytest.raises(TransferError):
        reader = between.open()
        self_test(reader, between.local, peer_num_blocks=NUM_BLOCKS)


def test_a_block_recycled_half_way_makes_the_read_stale_and_nothing_else(between):
    between.start(name="stale")
    between.reader.poll(0.0)
    between.owner.say("bump 1")
    between.owner.say("fill 1 99")
    last = NUM_BLOCKS - 1
    between.owner.say(f"bump {last}")
    between.owner.say(f"fill {last} 99")
    results = finish(between.reader)
    assert [result.reason for result in results] == ["stale_generation"]
    between.start(name="again")
    assert [result.ok for result in finish(between.reader)] == [True]
    assert content(between.local, 1) == 99


def test_a_second_life_of_the_owner_ends_reads_of_the_first(between):
    between.start()
    between.owner.say("epoch another")
    assert [result.reason for result in finish(between.reader)] == ["epoch"]


def test_the_self_test_passes_between_processes(between):
    test = self_test(between.reader, between.local, peer_num_blocks=NUM_BLOCKS)
    assert test.num_bytes == 4 * 2**20


def test_a_stopped_owner_can_be_read_over_shared_memory_until_it_is_killed(tmp_path):
    between = Between("shm", tmp_path / "run", False)
    between.start(name="stopped")
    between.owner.process.send_signal(signal.SIGSTOP)
    assert [result.ok for result in finish(between.reader)] == [True]
    between.owner.process.kill()
    between.owner.process.wait()
    between.close()


def test_an_owner_leaves_nothing_in_dev_shm_when_killed(tmp_path):
    before = os.listdir("/dev/shm")
    between = Between("shm", tmp_path / "run", True)
    between.owner.process.kill()
    between.close()
    assert os.listdir("/dev/shm") == before


def test_a_stand_in_ends_with_its_standard_input(tmp_path):
    with StandIn("shm", tmp_path / "run", layout=LAYOUT, num_blocks=2) as owner:
        assert owner.process.poll() is None
    assert owner.process.returncode == 0


def test_every_link_of_this_machine_is_described_in_one_line():
    lines = list(describe())
    assert [line.split()[0] for line in lines] == ["KV", "shm", "tcp"]
    assert all("GB/s" in line for line in lines[1:])
