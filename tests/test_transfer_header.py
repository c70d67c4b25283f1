import mmap
import os

import pytest

from kv_transfer.header import GenerationHeader, HeaderView
from pdserve.errors import TransferError


@pytest.fixture
def header():
    it = GenerationHeader(num_blocks=8, epoch="one", num_fixed=2)
    yield it
    it.close()


@pytest.fixture
def view(header):
    return HeaderView(header.fd, total_blocks=10)


def test_what_was_published_is_valid_until_its_block_is_recycled(header, view):
    seen = header.generations([3, 4])
    assert view.why_invalid("one", [3, 4], seen) is None
    header.bump(5)
    assert view.why_invalid("one", [3, 4], seen) is None
    header.bump(4)
    assert view.why_invalid("one", [3, 4], seen) == "stale_generation"
    assert view.why_invalid("one", [3], seen[:1]) is None


def test_several_blocks_are_raised_at_once(header, view):
    seen = header.generations(range(8))
    header.bump(1, 2)
    assert [view.why_invalid("one", [b], [seen[b]]) is None for b in range(4)] == [True, False, False, True]


def test_a_new_epoch_invalidates_everything_of_the_old_one(header, view):
    seen = header.generations([3])
    header.set_epoch("two")
    assert view.why_invalid("one", [3], seen) == "epoch"
    assert view.why_invalid("two", [3], seen) == "stale_generation"
    assert view.why_invalid("two", [3], header.generations([3])) is None


def test_at_no_moment_does_a_new_life_look_like_a_recycled_block(header, view, monkeypatch):
    """A reader between any two stores of the owner sees all of the old life, or its end."""
    seen, reasons = header.generations([3]), []

    def fence():
        monkeypatch.undo()
        reasons.append(view.why_invalid("one", [3], seen))
        monkeypatch.setattr("kv_transfer.header.full_fence", fence)

    monkeypatch.setattr("kv_transfer.header.full_fence", fence)
    header.set_epoch("two")
    assert reasons == ["epoch", "epoch"]


def test_fixed_blocks_stay_at_generation_one(header, view):
    header.set_epoch("two")
    assert view.why_invalid("two", [8, 9], [1, 1]) is None
    with pytest.raises(AssertionError):
        header.bump(8)


@pytest.mark.parametrize(("blocks", "generations"), [([10], [1]), ([-1], [1]), ([1, 2], [1])])
def test_ids_out_of_range_and_unequal_lists_are_never_valid(view, blocks, generations):
    assert view.why_invalid("one", blocks, generations) is not None


def test_generations_are_64_bit(header, view):
    assert view.why_invalid("one", [1], [2**64 - 1]) is not None


def test_the_owner_can_ask_about_its_own_header(header):
    seen = header.generations([1])
    assert header.why_invalid("one", [1], seen) is None
    assert header.why_invalid("two", [1], seen) == "epoch"
    header.bump(1)
    assert header.why_invalid("one", [1], seen) == "stale_generation"


def test_a_reader_cannot_write_or_resize_the_header(header):
    with pytest.raises(PermissionError):
        mmap.mmap(header.fd, 64)
    with pytest.raises(PermissionError):
        os.ftruncate(header.fd, 1)


@pytest.mark.parametrize("total_blocks", [9, 11, 0, 2**40])
def test_a_header_of_another_size_is_refused(header, total_blocks):
    with pytest.raises(TransferError) as caught:
        HeaderView(header.fd, total_blocks=total_blocks)
    assert caught.value.reason == "bad_header"


def test_memory_that_is_no_header_is_refused():
    fd = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 64 + 8)
    with pytest.raises(TransferError, match="not a sealed memfd"):
        HeaderView(fd, total_blocks=1)
    os.close(fd)
