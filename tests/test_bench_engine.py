"""The engine bench: costs and ceilings it measures against, ratios, hand-off arithmetic, and its own steps."""

import os

import pytest
import torch

from bench.ceilings import Ceiling, ReadBandwidth, gemm, time_s
from bench.cores import on_cores
from bench.engine import (
    Cost,
    Pairs,
    Steps,
    decode_cost,
    linear_shapes,
    overhead_row,
    prefill_cost,
    speed_rows,
    target_checks,
)
from bench.handoff import handoff_ms
from bench.inprocess import Engine
from bench.quality import Difference, compare
from bench.report import Row
from bench.rival import Rival
from bench.tiny_models import save_tiny
from pdserve.errors import ConfigError
from pdserve.model.spec import read_spec


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_tiny("llama3", tmp_path_factory.mktemp("tiny"), 0)


@pytest.fixture(scope="module")
def spec(directory):
    return read_spec(directory)


def test_products_are_those_of_a_fused_layer(spec):
    assert linear_shapes(spec) == [(256, 128), (128, 128), (384, 128), (128, 192)]


def test_a_decode_step_reads_all_weights_once_and_each_sequences_cache(spec):
    one, two = decode_cost(spec, 1, 16), decode_cost(spec, 2, 16)
    cache = 16 * spec.kv_layout(dtype="bfloat16", block_size=16).token_bytes
    weights = 2 * (4 * sum(n * k for n, k in linear_shapes(spec)) + spec.vocab_size * spec.hidden_size)
    assert (one.num_bytes, two.num_bytes) == (weights + cache, weights + 2 * cache)


def test_prefill_needs_lm_head_for_one_row_only(spec):
    head = 2 * spec.vocab_size * spec.hidden_size
    attention = 4 * spec.num_heads * spec.head_dim * spec.num_layers
    layers = 2 * spec.num_layers * sum(n * k for n, k in linear_shapes(spec))
    assert prefill_cost(spec, 1).flops == layers + attention + head
    assert prefill_cost(spec, 2).flops == 2 * layers + 3 * attention + head


def test_the_slower_of_reading_and_computing_bounds_a_step():
    cost = Cost(num_bytes=100, flops=1000)
    fast, slow = Ceiling(per_s=1e6, how=""), Ceiling(per_s=10.0, how="")
    assert cost.least_s(slow, fast) == 10.0
    assert cost.least_s(fast, slow) == 100.0


def test_a_ratio_is_the_median_over_pairs():
    pairs = Pairs(name="p", ours_s=[1.0, 1.0, 10.0], theirs_s=[2.0, 3.0, 10.0])
    assert pairs.ratio == 2.0
    assert pairs.row().parameters == {"ours_ms": 1000.0, "theirs_ms": 3000.0, "pairs": 3}


def test_the_hand_off_ends_with_the_second_token_less_one_step():
    phases = {"first_send": 1.0, "handoff_tail": 4.0, "decode_wait": 2.0, "first_decode": 30.0, "decode": 280.0}
    assert handoff_ms(phases, 12) == pytest.approx(9.0)


def test_the_first_run_is_not_counted():
    calls = []
    time_s(lambda: calls.append(1), 3)
    assert len(calls) == 4


def test_one_core_is_given_back():
    before = os.sched_getaffinity(0), torch.get_num_threads()
    with on_cores(1) as cores:
        assert (os.sched_getaffinity(0), torch.get_num_threads()) == (set(cores), 1)
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == before


def test_more_cores_than_are_allowed_are_refused():
    with pytest.raises(ConfigError, match="4096 cores are wanted"), on_cores(4096):
        pass


def test_targets_are_judged_on_one_core_with_full_weights_only():
    about = {"cores": 1, "tokens": 512}
    fast = Row(name="prefill", value=7.0, unit="x", parameters=about, ceiling=10.0)
    slow = Row(name="decode", value=1.0, unit="x", parameters={"cores": 1, "batch": 1, "context": 128}, ceiling=2.0)
    others = [
        Row(name="prefill", value=1.0, unit="x", parameters=about | {"cores": 2}, ceiling=10.0),
        Row(name="decode", value=1.0, unit="x", parameters=slow.parameters | {"weights": "int8"}, ceiling=9.0),
    ]
    assert [(check.value, check.is_ok) for check in target_checks([fast, slow, *others])] == [(0.7, True), (2.0, False)]


def test_a_step_without_kernels_runs_all_that_is_around_them(directory):
    engine = Engine(directory, dtype="bfloat16", num_blocks=32 * 65 + 1)
    row = overhead_row(engine, directory, 1)
    assert row is not None and row.value > 0


def test_rounded_weights_differ_from_full_ones_and_equal_weights_do_not(directory):
    full = Engine(directory, dtype="float32", num_blocks=8)
    rounded = Engine(directory, dtype="float32", num_blocks=8, int8=True)
    texts = [list(range(3, 60)), list(range(40, 90))]
    same, other = compare(full, full, texts), compare(full, rounded, texts)
    assert (same.positions, same.agreed, same.divergence) == (105, 105, 0.0)
    assert other.divergence > 0 and other.positions == 105
    assert [row.name for row in other.rows()] == [
        "int8_same_likeliest_token",
        "int8_divergence",
        "int8_perplexity_ratio",
    ]


def test_a_text_that_surprises_less_has_a_ratio_below_one():
    difference = Difference(positions=10, agreed=10, surprise_full=20.0, surprise_rounded=10.0)
    assert list(difference.rows())[-1].value == pytest.approx(0.3679, abs=1e-4)


def test_every_way_of_reading_is_tried_and_the_best_is_named():
    found = ReadBandwidth(1 << 20).measure(1 << 20)
    assert found.per_s > 0
    assert "streams" in found.how or found.how == "torch.sum"


def test_every_prefill_and_decode_shape_has_a_row_with_its_ceiling(directory):
    engine = Engine(directory, dtype="bfloat16", num_blocks=32 * 65 + 1)
    rows = list(speed_rows(Steps(engine), 1, 1, lambda text: None))
    assert [row.parameters["tokens"] for row in rows if row.name == "prefill"] == [128, 512, 2048]
    shapes = [(row.parameters["batch"], row.parameters["context"]) for row in rows if row.name == "decode"]
    assert shapes == [(batch, context) for batch in (1, 8, 32) for context in (128, 1024)]
    assert all(row.ceiling for row in rows if row.name in ("prefill", "decode"))


def test_the_products_ceiling_is_over_the_models_shapes_and_2048_cubed(directory, spec):
    engine = Engine(directory, dtype="float32", num_blocks=4)
    found = gemm([(64, 64)], torch.float32, engine.runner.decoder.kernels.layer, rows=8)
    assert found.per_s > 0
    assert found.how.split(", ")[1] in ("8 x 64 x 64", "2048 x 2048 x 2048")


def test_the_rival_takes_turns_with_us_at_the_same_context(directory):
    contexts = []
    times = Rival(directory).decode_s(2, 5, 3, contexts.append)
    assert len(times) == 3
    assert contexts[:3] == [6, 7, 8]
