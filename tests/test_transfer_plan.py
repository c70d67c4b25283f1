import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transfer_kit import LAYOUT, make_pool, run, target

from kv_transfer.offers import export_pool
from kv_transfer.plan import Coverage, Piece, adjacent, check_run, coalesce
from pdserve.errors import ConfigError, TransferError


def pairs(coverage, target_, *runs):
    """What has to be copied: (source block, destination block)."""
    return [(source.block, target_.table[index]) for index, source in coverage.add(runs)]


def test_a_run_is_paired_with_the_table_by_position():
    want = target(10)
    assert pairs(Coverage(want), want, run(0, 10, [7, 3, 9])) == [(7, 100), (3, 101), (9, 102)]


def test_a_later_run_goes_where_its_positions_are_whatever_came_before():
    want = target(16)
    assert pairs(Coverage(want), want, run(8, 8, [5, 6])) == [(5, 102), (6, 103)]


@pytest.mark.parametrize("num_tokens", [511, 512, 513])
@pytest.mark.parametrize("held", range(33))
def test_exactly_the_missing_positions_are_read(num_tokens, held):
    held = min(held, num_tokens // 16)
    num_blocks = -(-num_tokens // 16)
    want = target(num_tokens, held=held, block_size=16, table=range(100, 100 + num_blocks))
    found = pairs(Coverage(want), want, run(0, num_tokens, range(1, num_blocks + 1)))
    assert found == [(index + 1, 100 + index) for index in range(held, num_blocks)]


def test_a_run_that_begins_before_what_is_missing_is_trimmed_at_its_start():
    want = target(16, held=3)
    assert pairs(Coverage(want), want, run(8, 8, [5, 6])) == [(6, 103)]


def test_with_everything_held_there_is_nothing_to_read_and_all_is_covered():
    want = target(16, held=4)
    coverage = Coverage(want)
    assert coverage.is_complete
    assert pairs(coverage, want, run(0, 16, [1, 2, 3, 4])) == []


def test_a_repeated_run_brings_nothing_new():
    want = target(8)
    coverage = Coverage(want)
    coverage.add([run(0, 8, [1, 2])])
    assert pairs(coverage, want, run(0, 8, [1, 2])) == []


def test_an_overlapping_run_that_agrees_brings_only_what_is_new():
    want = target(12)
    coverage = Coverage(want)
    coverage.add([run(0, 8, [1, 2])])
    assert pairs(coverage, want, run(4, 8, [2, 3])) == [(3, 102)]


def test_coverage_is_complete_only_when_every_missing_position_was_published():
    coverage = Coverage(target(12, held=1))
    coverage.add([run(8, 4, [3])])
    assert not coverage.is_complete
    coverage.add([run(4, 4, [2])])
    assert coverage.is_complete


def test_a_table_may_be_longer_than_the_prompt():
    want = target(4, table=[100, 101, 102])
    assert pairs(Coverage(want), want, run(0, 4, [9])) == [(9, 100)]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (run(2, 4, [1]), "inside a block"),
        (run(-4, 4, [1]), "negative"),
        (run(0, 0, []), "empty"),
        (run(0, 16, [1, 2, 3, 4]), "past the end"),
        (run(12, 4, [1]), "starts at the end"),
        (run(0, 6, [1, 2]), "partial before the end"),
        (run(0, 8, [1]), "too few blocks"),
        (run(0, 4, [1, 2]), "too many blocks"),
        (run(0, 8, [1, 2], [1]), "too few generations"),
        (run(0, 4, [0]), "the null block"),
        (run(0, 4, [64]), "out of range"),
        (run(0, 4, [-1]), "negative id"),
        (run(0, 4, [2**70]), "huge id"),
        (run(0, 4, [1], [0]), "no generation"),
        (run(0, 4, [1], [2**64]), "generation too large"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_impossible_run_is_a_transfer_error(bad, why):
    with pytest.raises(TransferError) as caught:
        check_run(bad, target(11))
    assert caught.value.reason == "malformed_run"


def test_one_position_cannot_be_published_in_two_blocks():
    coverage = Coverage(target(8))
    coverage.add([run(0, 4, [1])])
    with pytest.raises(TransferError, match="published as"):
        coverage.add([run(0, 4, [2])])


def test_one_position_cannot_be_published_in_two_generations():
    coverage = Coverage(target(8))
    coverage.add([run(0, 4, [1], [5])])
    with pytest.raises(TransferError):
        coverage.add([run(0, 4, [1], [6])])


@pytest.mark.parametrize("second", [run(4, 4, [1]), run(4, 8, [2, 1]), run(4, 8, [2, 2])])
def test_one_block_cannot_hold_two_positions(second):
    coverage = Coverage(target(12))
    coverage.add([run(0, 4, [1])])
    with pytest.raises(TransferError, match="two positions"):
        coverage.add([second])


def test_a_refused_message_leaves_no_trace():
    want = target(8)
    coverage = Coverage(want)
    with pytest.raises(TransferError):
        coverage.add([run(0, 4, [1]), run(4, 4, [1])])
    assert pairs(coverage, want, run(0, 8, [5, 6])) == [(5, 100), (6, 101)]


@given(st.permutations(range(6)), st.integers(0, 6))
def test_the_order_in_which_runs_arrive_does_not_matter(order, held):
    want = target(24, held=held)
    coverage = Coverage(want)
    found = [pair for index in order for pair in pairs(coverage, want, run(4 * index, 4, [index + 1]))]
    assert sorted(found) == [(index + 1, 100 + index) for index in range(held, 6)]
    assert coverage.is_complete


def test_blocks_adjacent_on_both_sides_are_one_piece():
    assert coalesce([4, 5, 6], [9, 10, 11]) == [Piece(source=4, destination=9, count=3)]


@pytest.mark.parametrize("destinations", [[9, 11, 12], [9, 8, 7], [9, 9, 9]])
def test_a_piece_ends_where_either_side_stops_being_adjacent(destinations):
    assert len(coalesce([4, 5, 6], destinations)) > 1
    assert len(coalesce(destinations, [4, 5, 6])) > 1


def test_nothing_is_no_pieces():
    assert coalesce([], []) == []
    assert adjacent([]) == []


def test_stretches_of_consecutive_ids():
    assert adjacent([3, 4, 5, 9, 2, 3]) == [(3, 3), (9, 1), (2, 2)]


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), max_size=40))
def test_pieces_say_exactly_the_same_as_the_pairs(both):
    pieces = coalesce([source for source, _ in both], [destination for _, destination in both])
    spelled = [(piece.source + i, piece.destination + i) for piece in pieces for i in range(piece.count)]
    assert spelled == both


def test_a_pool_on_a_device_travels_over_tcp_only(tmp_path):
    pool = make_pool(on_device=True)
    with pytest.raises(ConfigError, match="--kv-link shm cannot reach a KV pool on a device"):
        export_pool(pool, kinds="shm", folder=tmp_path / "run")
    exports = export_pool(pool, kinds="auto", folder=tmp_path / "run")
    assert [offer.kind for offer in exports.offers] == ["tcp"]
    exports.close()
    pool.close()


@pytest.mark.parametrize(
    ("reader", "owner", "obstacle"),
    [("full", "full", None), ("int8", "full", None), ("int8", "int8", None), ("full", "int8", "int8 weights")],
)
def test_kv_of_int8_weights_never_enters_a_full_cache(reader, owner, obstacle):
    mine, theirs = (dataclasses.replace(LAYOUT, weights=weights) for weights in (reader, owner))
    why = mine.why_unreadable(theirs)
    assert why is None if obstacle is None else obstacle in why
