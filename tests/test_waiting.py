"""The queue: order by policy, patience by bound."""

from pdserve.waiting import Verdict, Waiting


def queue_of(names, max_overtakes=2):
    queue = Waiting(max_overtakes)
    for name in names:
        queue.add(name, name)
    return queue


def offer(queue, blocked="", deferred="", most=99, rank=lambda name: (0,)):
    admitted = []

    def admit(name):
        if len(admitted) == most:
            return Verdict.STOP
        if name in deferred:
            return Verdict.DEFERRED
        if name in blocked:
            return Verdict.BLOCKED
        admitted.append(name)
        return Verdict.ADMITTED

    queue.offer(rank, admit)
    return "".join(admitted)


def test_equal_ranks_leave_in_order_of_arrival():
    assert offer(queue_of("abc")) == "abc"


def test_the_lowest_rank_leaves_first():
    assert offer(queue_of("abc"), rank=lambda name: (-ord(name),)) == "cba"


def test_one_that_does_not_fit_is_passed_only_up_to_the_bound():
    queue = queue_of("abcde", max_overtakes=2)
    assert offer(queue, blocked="a") == "bc"
    assert offer(queue, blocked="a") == ""
    assert offer(queue) == "ade"


def test_a_rank_cannot_starve_anybody_either():
    queue = queue_of("abcdef", max_overtakes=2)
    assert offer(queue, most=3, rank=lambda name: (-ord(name),)) == "fea"


def test_who_waits_for_something_under_way_is_not_overtaken():
    queue = queue_of("abcde", max_overtakes=1)
    offer(queue, deferred="a", most=0)
    assert offer(queue, deferred="a") == "bcde"
    assert offer(queue) == "a"


def test_stop_ends_the_round():
    assert offer(queue_of("abc"), most=1) == "a"


def test_an_entry_can_leave_by_itself_and_unknown_ones_are_ignored():
    queue = queue_of("abc")
    assert queue.pop("b") == "b" and queue.pop("b") is None
    assert list(queue) == ["a", "c"] and len(queue) == 2 and "b" not in queue


def test_adding_twice_keeps_the_place():
    queue = queue_of("ab")
    queue.add("a", "again")
    assert list(queue) == ["a", "b"]
