"""Recorded decode steps: buckets, padding, and that they compute what the decoder computes."""

import pytest
import torch
from model_kit import Engine, save_tiny

from pdserve.model.graphs import SHORT_CONTEXT, DecodeGraphs, buckets
from pdserve.model.runner import Work
from pdserve.model.sampling import SampleRow
from pdserve.request import Sampling

GREEDY = Sampling(max_tokens=1, temperature=0.0)


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (100, [1, 2, 4, *range(8, 65, 8), 96, 100]),
    ],
)
def test_buckets_end_with_the_largest_batch(most, sizes):
    assert buckets(most) == sizes


class Recorder:
    """Stands in for a CUDA graph: runs the same work on the same buffers again."""

    def __init__(self):
        self.num_recorded = self.num_replayed = 0

    def __call__(self, work):
        self.num_recorded += 1
        out = work().clone()

        def replay():
            self.num_replayed += 1
            out.copy_(work())

        return replay, out


def decode_work(runner, index, length):
    blocks = range(1 + 4 * index, 5 + 4 * index)
    row = SampleRow(sampling=GREEDY, seed=0, prompt=(), output=(), position=length)
    tokens = [(7 * index + 3 * at) % 50 + 3 for at in range(length)]
    runner.step([Work(tokens=tokens[:-1], start=0, block_table=blocks)])
    return Work(tokens=tokens[-1:], start=length - 1, block_table=blocks, sample=(row,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny("smollm2", tmp_path_factory.mktemp("graphs"))


@pytest.fixture
def runner(folder):
    return Engine(folder, num_blocks=40).runner


def with_graphs(runner, max_batch=4, max_context=64):
    recorder = Recorder()
    with torch.inference_mode():
        runner.graphs = DecodeGraphs(
            runner.decoder, runner.kv, max_batch=max_batch, max_context=max_context, capture=recorder
        )
    return recorder


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_a_recorded_step_draws_the_same_tokens(runner, batch):
    works = [decode_work(runner, index, 5 + 11 * index) for index in range(batch)]
    expected = runner.step(works)
    recorder = with_graphs(runner)
    assert runner.step(works) == expected
    assert recorder.num_replayed == 1 and recorder.num_recorded == 3


def test_a_smaller_step_after_a_larger_one_is_not_disturbed_by_its_rows(runner):
    works = [decode_work(runner, index, 9 + index) for index in range(4)]
    expected = [runner.step([work])[0] for work in works]
    with_graphs(runner)
    runner.step(works)
    before = runner.kv[1:].clone()
    assert runner.step(works[:3]) == expected[:3]
    assert torch.equal(runner.kv[1:].nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("why", ["prefill", "too many rows", "too long"])
def test_steps_that_fit_no_graph_run_as_before(runner, why):
    works = [decode_work(runner, index, 20) for index in range(3)]
    recorder = with_graphs(
        runner, max_batch=2 if why == "too many rows" else 4, max_context=16 if why == "too long" else 64
    )
    if why == "prefill":
        works[0] = Work(tokens=[5, 6, 7], start=0, block_table=range(30, 34))
    assert len(runner.step(works)) == 3
    assert recorder.num_replayed == 0


def test_long_contexts_have_graphs_of_their_own(runner):
    recorder = with_graphs(runner, max_batch=1, max_context=2 * SHORT_CONTEXT)
    assert recorder.num_recorded == 2
