"""The engine bench: costs and ceilings it measures against, ratios, hand-off arithmetic, and its own steps."""

import os

import pytest
import torch

from bench.ceilings import Ceiling, ReadBandwidth, gemm, time_s
from bench.engine import Cost, Pairs, Steps, decode_cost, linear_shapes, one_core, prefill_cost, speed_rows
from bench.handoff import handoff_ms
from bench.inprocess import Engine
from bench.rival import Rival
from bench.tiny_models import save_tiny
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
    with one_core() as core:
        assert (os.sched_getaffinity(0), torch.get_num_threads()) == ({core}, 1)
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == before


def test_every_way_of_reading_is_tried_and_the_best_is_named():
    found = ReadBandwidth(1 << 20).measure(1 << 20)
    assert found.per_s > 0
    assert "streams" in found.how or found.how == "torch.sum"


def test_every_prefill_and_decode_shape_has_a_row_with_its_ceiling(directory):
    engine = Engine(directory, dtype="bfloat16", num_blocks=32 * 65 + 1)
    rows = list(speed_rows(engine, Steps(engine), 1, lambda text: None))
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
