"""What holds for every link, whatever moves the bytes."""

import dataclasses

import pytest
from transfer_kit import NUM_BLOCKS, content, fill, finish, linked, read_of

from kv_transfer.links import BlockRead, Pacer
from kv_transfer.selftest import self_test
from pdserve.errors import TransferError


@pytest.fixture(params=["shm", "memfd", "tcp", "device"])
def pair(request, tmp_path):
    kind = "tcp" if request.param in ("tcp", "device") else "shm"
    with linked(kind, tmp_path, shared=request.param == "memfd", on_device=request.param == "device") as pair:
        yield pair
        assert pair.reader.num_pending == 0


def test_blocks_arrive_where_they_belong(pair):
    fill(pair.owner, 3, 4, 5, 9)
    (result,) = pair.read([3, 4, 5, 9], [20, 21, 7, 8])
    assert result.ok
    assert [content(pair.local, block) for block in (20, 21, 7, 8)] == [3, 4, 5, 9]


def test_no_other_block_is_touched(pair):
    fill(pair.local, *range(1, NUM_BLOCKS))
    pair.read([3, 9], [20, 22])
    untouched = [block for block in range(1, NUM_BLOCKS) if block not in (20, 22)]
    assert [content(pair.local, block) for block in untouched] == untouched


def test_many_scattered_blocks_arrive(pair):
    sources, destinations = list(range(NUM_BLOCKS - 1, 0, -1)), list(range(1, NUM_BLOCKS))
    fill(pair.owner, *sources)
    (result,) = pair.read(sources, destinations)
    assert result.num_bytes == len(sources) * pair.local.block_bytes
    assert [content(pair.local, block) for block in destinations] == sources


def test_a_block_recycled_after_it_was_published_is_stale(pair):
    read = read_of(pair.owner, [3, 4], [20, 21])
    pair.owner.header.bump(4)
    pair.reader.start(read)
    (result,) = finish(pair.reader)
    assert (result.reason, result.num_bytes) == ("stale_generation", 0)


def test_a_stale_read_harms_no_other(pair):
    fill(pair.owner, 5)
    stale = read_of(pair.owner, [3], [20], "stale")
    pair.owner.header.bump(3)
    pair.reader.start(stale)
    pair.reader.start(read_of(pair.owner, [5], [21], "good"))
    assert {result.read_id: result.reason for result in finish(pair.reader)} == {
        "stale": "stale_generation",
        "good": "",
    }
    assert content(pair.local, 21) == 5


def test_what_an_old_epoch_published_cannot_be_read(pair):
    read = read_of(pair.owner, [3], [20])
    pair.owner.header.set_epoch("another life")
    pair.reader.start(read)
    (result,) = finish(pair.reader)
    assert result.reason == "epoch"


def test_a_generation_from_the_future_is_refused(pair):
    pair.reader.start(BlockRead(read_id=1, sources=(3,), generations=(99,), destinations=(20,)))
    (result,) = finish(pair.reader)
    assert result.reason == "stale_generation"


def test_an_abandoned_read_is_quiescent_and_has_no_result(pair):
    fill(pair.local, 20)
    pair.reader.start(read_of(pair.owner, [3], [20], "unwanted"))
    pair.reader.abandon("unwanted")
    assert pair.reader.is_quiescent("unwanted")
    assert [result.read_id for result in pair.read([4], [21], "wanted")] == ["wanted"]
    assert content(pair.local, 20) == 20


def test_a_read_under_way_is_not_quiescent_until_its_result(pair):
    pair.reader.start(read_of(pair.owner, [3], [20], "r"))
    assert not pair.reader.is_quiescent("r")
    finish(pair.reader)
    assert pair.reader.is_quiescent("r")


def test_abandoning_what_is_not_there_is_ignored(pair):
    pair.reader.abandon("never started")
    assert pair.reader.is_quiescent("never started")


def test_closing_twice_is_harmless_and_leaves_nothing_pending(pair):
    pair.reader.start(read_of(pair.owner, [3], [20]))
    pair.reader.close()
    pair.reader.close()
    assert pair.reader.num_pending == 0
    assert pair.reader.is_broken


@pytest.mark.parametrize(
    "change",
    [
        {"sources": (0, 3)},
        {"sources": (-1, 3)},
        {"sources": (3, 10**9)},
        {"destinations": (0, 20)},
        {"destinations": (20, 10**9)},
        {"destinations": (20, 20)},
        {"generations": (1,)},
        {"generations": (0, 1)},
        {"generations": (1, 2**64)},
        {"sources": (), "generations": (), "destinations": ()},
    ],
    ids=str,
)
def test_a_read_that_does_not_fit_the_pools_is_refused(pair, change):
    sound = BlockRead(read_id=1, sources=(3, 4), generations=(1, 1), destinations=(20, 21))
    with pytest.raises(TransferError) as caught:
        pair.reader.start(dataclasses.replace(sound, **change))
    assert caught.value.reason == "malformed_run"


def test_only_bytes_of_reads_that_counted_are_counted(pair):
    pair.read([3, 4], [20, 21])
    stale = read_of(pair.owner, [5], [22])
    pair.owner.header.bump(5)
    pair.reader.start(stale)
    finish(pair.reader)
    assert pair.reader.num_bytes == 2 * pair.local.block_bytes


def test_the_self_test_passes_and_disturbs_no_block(pair):
    fill(pair.local, *range(NUM_BLOCKS))
    fill(pair.owner, *range(NUM_BLOCKS))
    test = self_test(pair.reader, pair.local, peer_num_blocks=NUM_BLOCKS)
    assert test.kind == pair.reader.kind
    assert test.bytes_per_s > 0
    assert "GB/s" in str(test)
    for pool in (pair.local, pair.owner):
        assert [content(pool, block) for block in range(NUM_BLOCKS)] == list(range(NUM_BLOCKS))


def test_the_self_test_notices_other_bytes_than_expected(pair):
    changed = pair.owner.read(pair.owner.test_blocks.start).copy()
    changed[5] ^= 1
    pair.owner.write(pair.owner.test_blocks.start, changed)
    with pytest.raises(TransferError) as caught:
        self_test(pair.reader, pair.local, peer_num_blocks=NUM_BLOCKS)
    assert caught.value.reason == "self_test"


def test_a_self_test_after_a_new_epoch_passes_with_a_new_reader(pair):
    pair.owner.header.set_epoch("another life")
    reader = pair.open(dataclasses.replace(pair.peer, epoch="another life"))
    assert self_test(reader, pair.local, peer_num_blocks=NUM_BLOCKS).num_bytes > 0
    reader.close()


def test_a_slice_starts_small_and_grows_with_what_was_achieved():
    pacer = Pacer(slice_s=0.002, first_bytes=1000, most_bytes=10_000)
    assert pacer.slice_bytes == 1000
    for _ in range(20):
        pacer.note(pacer.slice_bytes, 0.0004)
    assert pacer.slice_bytes == 10_000


def test_a_slice_that_took_too_long_is_cut_at_once():
    pacer = Pacer(slice_s=0.002, first_bytes=1000)
    pacer.note(1000, 0.004)
    assert pacer.slice_bytes == 500


def test_a_small_read_within_its_time_says_nothing_about_the_rate():
    pacer = Pacer(slice_s=0.002, first_bytes=1000)
    pacer.note(10, 0.001)
    assert pacer.slice_bytes == 1000
