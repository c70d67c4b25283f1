"""What the core has promised, and that it adds up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.ledger import Entry, Ledger
from pdserve.messages import Key

K1, K2 = Key(request="a", attempt=1), Key(request="a", attempt=2)


def ledger_with(**entries: Entry) -> Ledger:
    ledger = Ledger()
    ledger.open("w", 10)
    for name, entry in entries.items():
        ledger.reserve("w", {"k1": K1, "k2": K2}[name], entry)
    return ledger


def test_reservations_add_up_and_come_back():
    ledger = ledger_with(k1=Entry(blocks=3, num_samples=2), k2=Entry(blocks=4, queued_tokens=9))
    assert ledger.book("w").free_blocks == 3
    assert ledger.release("w", K1) and not ledger.release("w", K1)
    assert ledger.book("w").free_blocks == 6
    ledger.check()


def test_a_prompt_is_computed_once_and_a_landing_lands_once():
    ledger = ledger_with(k1=Entry(blocks=3, queued_tokens=5, is_landing=True))
    assert (ledger.prefilled("w", K1), ledger.prefilled("w", K1)) == (True, False)
    assert (ledger.landed("w", K1), ledger.landed("w", K1)) == (True, False)
    assert (ledger.book("w").queued_tokens, ledger.book("w").landing_blocks, ledger.book("w").blocks) == (0, 0, 3)


def test_a_landing_that_grows_is_still_all_landing():
    ledger = ledger_with(k1=Entry(blocks=3, is_landing=True))
    ledger.grow("w", K1, 2)
    assert ledger.book("w").landing_blocks == 5
    ledger.check()


def test_a_dead_worker_owes_nothing():
    ledger = ledger_with(k1=Entry(blocks=3))
    ledger.close("w")
    assert ledger.num_entries == 0 and ledger.is_empty("w") and not ledger.release("w", K1)
    ledger.grow("w", K1, 1)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4))))
def test_totals_are_always_the_sum_of_the_entries(steps):
    ledger = ledger_with()
    for request, what in steps:
        key = Key(request=str(request), attempt=1)
        if what == 0 and not ledger.holds("w", key):
            ledger.reserve("w", key, Entry(blocks=request, queued_tokens=request, num_samples=1, is_landing=True))
        elif what == 1:
            ledger.release("w", key)
        elif what == 2:
            ledger.landed("w", key)
        elif what == 3:
            ledger.prefilled("w", key)
        else:
            ledger.grow("w", key, 1)
        ledger.check()
