"""What the core believes each worker has cached."""

from __future__ import annotations

from coordinator.prefix_index import PrefixIndex
from pdserve.messages import CacheEvents


def events(first: int, stored: bytes = b"", removed: bytes = b"", *, is_snapshot: bool = False) -> CacheEvents:
    """One digest per letter."""
    return CacheEvents(
        first=first,
        stored=tuple(bytes([each]) for each in stored),
        removed=tuple(bytes([each]) for each in removed),
        is_snapshot=is_snapshot,
    )


def index_with(*messages: CacheEvents) -> PrefixIndex:
    index = PrefixIndex()
    index.open("w")
    for message in messages:
        assert index.apply("w", message)
    return index


def leading(index: PrefixIndex, prompt: bytes) -> int:
    return index.num_leading("w", [bytes([each]) for each in prompt])


def test_only_a_prefix_counts():
    index = index_with(events(0, b"acd"))
    assert (leading(index, b"abc"), leading(index, b"ac"), leading(index, b"cd"), leading(index, b"")) == (1, 2, 2, 0)


def test_removed_blocks_no_longer_count():
    index = index_with(events(0, b"abc"), events(1, b"d", b"b"))
    assert leading(index, b"abc") == 1


def test_a_gap_empties_the_index_until_a_snapshot():
    index = index_with(events(0, b"abc"))
    assert index.apply("w", events(2, b"d")) is False
    assert index.apply("w", events(3, b"e")) is True
    assert leading(index, b"abc") == 0
    index.apply("w", events(4, b"ab", is_snapshot=True))
    index.apply("w", events(5, b"c"))
    assert leading(index, b"abc") == 3


def test_numbers_may_start_anywhere_after_hello():
    index = index_with(events(17, b"a"), events(18, b"b"))
    assert leading(index, b"ab") == 2


def test_a_message_lost_after_a_snapshot_is_a_gap_too():
    index = index_with(events(3, b"a", is_snapshot=True))
    assert index.apply("w", events(5, b"b")) is False


def test_a_closed_epoch_knows_nothing():
    index = index_with(events(0, b"a"))
    index.close("w")
    assert leading(index, b"a") == 0 and index.size("w") == 0 and index.apply("w", events(1, b"b"))
