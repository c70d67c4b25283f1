"""The transfer bench: which blocks it moves, and that both links and their bare copies run."""

import random

import pytest

from bench import transfer
from bench.report import BenchOptions, Row
from pdserve.layout import KVLayout

TINY = KVLayout(model="b", dtype="bfloat16", num_layers=2, num_kv_heads=1, head_dim=8, block_size=16)


@pytest.mark.parametrize("order", ["in order", "scattered"])
def test_blocks_are_distinct_and_never_the_null_block(order):
    blocks = transfer.blocks_of(20, 64, order, random.Random(0))
    for ids in (blocks.sources, blocks.destinations):
        assert len(set(ids)) == 20 and min(ids) >= 1 and max(ids) < 64
    assert (blocks.sources == tuple(range(1, 21))) is (order == "in order")


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_link_is_measured_beside_a_bare_copy(kind, monkeypatch):
    monkeypatch.setattr(transfer, "SHAPES", {"tiny": TINY})
    monkeypatch.setattr(transfer, "COUNTS", (1, 8))
    rows = list(transfer.rows_of(kind, "tiny", BenchOptions(is_quick=True), lambda text: None))
    asked = [(row.parameters["blocks"], row.parameters["order"]) for row in rows]
    assert asked == [(count, order) for count in (1, 8) for order in ("in order", "scattered")]
    assert all(row.value > 0 and row.ceiling > 0 for row in rows)


def test_only_large_transfers_have_a_target(monkeypatch):
    monkeypatch.setattr(transfer, "SHAPES", {"tiny": TINY})
    rows = [
        Row(name="transfer_shm", value=value, unit="GB/s", parameters={"model": "tiny", "blocks": blocks}, ceiling=10.0)
        for value, blocks in ((1.0, 16), (9.0, 128), (8.0, 1024))
    ]
    (check,) = transfer.checks_of(rows)
    assert (check.value, check.is_ok) == (0.8, False)
