import pytest
from transfer_kit import KEY, published, run, target

from kv_transfer.landing import Landing, Phase
from kv_transfer.links import ReadResult


def landing(num_tokens=8, held=0):
    return Landing(key=KEY, owner="e1", target=target(num_tokens, held=held))


def ok(read):
    return ReadResult(read_id=read.read_id, reason="", num_bytes=1, seconds=0.0)


def failed(read, reason="stale_generation"):
    return ReadResult(read_id=read.read_id, reason=reason, num_bytes=0, seconds=0.0)


def test_a_published_run_becomes_a_read_into_the_table():
    read = landing().publish(published(run(0, 8, [5, 6], [7, 8])))
    assert (read.sources, read.generations, read.destinations) == ((5, 6), (7, 8), (100, 101))


def test_it_is_landed_when_the_last_run_is_seen_and_everything_is_validated():
    it = landing()
    first = it.publish(published(run(0, 4, [5])))
    it.finish(ok(first))
    assert it.phase is Phase.READING
    last = it.publish(published(run(4, 4, [6]), is_last=True))
    assert it.phase is Phase.READING
    it.finish(ok(last))
    assert it.phase is Phase.LANDED


def test_everything_validated_is_not_enough_before_the_last_run_is_announced():
    it = landing()
    it.finish(ok(it.publish(published(run(0, 8, [5, 6])))))
    assert it.phase is Phase.READING
    assert it.publish(published(is_last=True)) is None
    assert it.phase is Phase.LANDED


def test_with_everything_held_the_last_run_alone_lands_it():
    it = landing(num_tokens=8, held=2)
    assert it.publish(published(run(0, 8, [5, 6]), is_last=True)) is None
    assert it.phase is Phase.LANDED


def test_a_repeated_message_starts_no_second_read():
    it = landing()
    message = published(run(0, 8, [5, 6]), is_last=True)
    read = it.publish(message)
    assert it.publish(message) is None
    it.finish(ok(read))
    assert it.phase is Phase.LANDED


def test_a_read_that_does_not_count_ends_the_landing_with_its_reason():
    it = landing()
    it.finish(failed(it.publish(published(run(0, 8, [5, 6]), is_last=True)), "peer_gone"))
    assert (it.phase, it.reason) == (Phase.OVER, "peer_gone")


def test_other_reads_must_be_quiescent_before_a_failed_landing_is_over():
    it = landing()
    bad = it.publish(published(run(0, 4, [5])))
    other = it.publish(published(run(4, 4, [6]), is_last=True))
    it.finish(failed(bad))
    assert (it.phase, it.outstanding) == (Phase.DRAINING, [other.read_id])
    it.quiescent(other.read_id)
    assert it.phase is Phase.OVER


def test_an_abort_drains_and_a_read_that_ends_by_itself_is_quiescent_too():
    it = landing()
    read = it.publish(published(run(0, 8, [5, 6]), is_last=True))
    it.fail("aborted")
    assert it.phase is Phase.DRAINING
    it.finish(ok(read))
    assert (it.phase, it.reason) == (Phase.OVER, "aborted")


def test_an_abort_without_reads_is_over_at_once():
    it = landing()
    it.fail("aborted")
    assert it.phase is Phase.OVER


def test_a_second_abort_is_ignored():
    it = landing()
    it.fail("aborted")
    it.fail("other")
    assert (it.phase, it.reason) == (Phase.OVER, "aborted")


def test_an_abort_after_landing_has_nothing_to_drain():
    it = landing()
    it.finish(ok(it.publish(published(run(0, 8, [5, 6]), is_last=True))))
    it.fail("aborted")
    assert it.phase is Phase.OVER


def test_what_is_published_after_an_abort_is_not_read():
    it = landing()
    it.publish(published(run(0, 4, [5])))
    it.fail("aborted")
    assert it.publish(published(run(4, 4, [6]), is_last=True)) is None


def test_results_and_quiescence_of_unknown_reads_are_ignored():
    it = landing()
    read = it.publish(published(run(0, 8, [5, 6]), is_last=True))
    it.finish(ReadResult(read_id="another", reason="timeout", num_bytes=0, seconds=0.0))
    it.quiescent("another")
    assert it.outstanding == [read.read_id]


@pytest.mark.parametrize(
    "message",
    [
        published(run(2, 4, [5])),
        published(run(0, 8, [5])),
        published(run(0, 8, [5, 5])),
        published(run(0, 4, [5]), is_last=True),
        published(is_last=True),
    ],
    ids=["off boundary", "too few blocks", "block twice", "gap at the end", "nothing at all"],
)
def test_an_impossible_message_fails_the_landing_and_never_raises(message):
    it = landing()
    assert it.publish(message) is None
    assert (it.phase, it.reason) == (Phase.OVER, "malformed_run")


def test_an_impossible_message_still_waits_for_reads_under_way():
    it = landing()
    read = it.publish(published(run(0, 4, [5])))
    it.publish(published(run(0, 4, [9])))
    assert it.phase is Phase.DRAINING
    it.quiescent(read.read_id)
    assert it.phase is Phase.OVER


def test_reads_of_one_landing_have_names_of_their_own():
    it = landing()
    first, second = it.publish(published(run(0, 4, [5]))), it.publish(published(run(4, 4, [6])))
    assert first.read_id != second.read_id
    assert it.num_validated == 0
    it.finish(ok(second))
    assert it.num_validated == 1
