"""All layers in one native call: the same bits as kernel by kernel, whatever the step, the threads and the weights."""

import pytest
import torch
from model_kit import FAMILIES, Engine, prompts, save_tiny

from pd_kernels import select
from pdserve.model.runner import SampleRow, Work
from pdserve.request import Sampling

GREEDY = Sampling(max_tokens=9, temperature=0.0)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def outcome(folder, works, *, weights, is_fused):
    """Logits of every row, what a step draws, and the cache afterwards."""
    dtype, _, int8 = weights.partition(" ")
    engine = Engine(folder, dtype=dtype, num_blocks=64, int8=bool(int8))
    if not is_fused:
        engine.runner.decoder._fused = None
    for prefix in works[0]:
        engine.runner.step([prefix])
    return engine.runner.logits(works[1]), engine.runner.step(works[1]), engine.runner.kv.clone()


def works_of(lengths, contexts, num_sampled):
    """Prefixes that fill the cache, and one step of decode rows and chunks of which the first few are sampled."""
    prefixes, step, block = [], [], 1
    for index, (length, context) in enumerate(zip(lengths, contexts, strict=True)):
        (tokens,) = prompts([length + context], seed=index)
        table = list(range(block, block + (length + context) // 16 + 1))[::-1]
        block += len(table)
        if context:
            prefixes.append(Work(tokens=tokens[:context], start=0, block_table=table))
        row = SampleRow(sampling=GREEDY, seed=0, prompt=(), output=(), position=length + context)
        sample = (row,) if index < num_sampled else ()
        step.append(Work(tokens=tokens[context:], start=context, block_table=table, sample=sample))
    return prefixes, step


@pytest.mark.parametrize("threads", [1, 2, 3], indirect=True)
@pytest.mark.parametrize("weights", ["bfloat16", "float32", "bfloat16 int8", "float32 int8"])
@pytest.mark.parametrize(
    ("lengths", "contexts", "num_sampled"),
    [
        ([1], [0], 1),
        ([1, 1, 1], [20, 3, 33], 3),
        ([7], [0], 1),
        ([1, 5, 150], [17, 16, 40], 2),
        ([90, 80], [0, 15], 0),
        ([1, 300], [4, 0], 1),
    ],
)
def test_a_step_in_one_call_has_the_same_bits(folder, threads, weights, lengths, contexts, num_sampled):
    works = works_of(lengths, contexts, num_sampled)
    fused, plain = (outcome(folder, works, weights=weights, is_fused=is_fused) for is_fused in (True, False))
    assert torch.equal(fused[0], plain[0])
    assert fused[1] == plain[1]
    assert torch.equal(fused[2].nan_to_num(), plain[2].nan_to_num())


def test_models_whose_products_are_native_run_in_one_call(tmp_path):
    if select("cpu", "float32", 64).name != "cpu":
        pytest.skip("no compiler here: the reference serves")
    runner = Engine(save_tiny("llama3", tmp_path / "tiny"), dtype="float32", num_blocks=8).runner
    assert runner.decoder._fused is not None


def test_results_of_a_step_do_not_depend_on_a_larger_one_before(folder):
    engine = Engine(folder, dtype="bfloat16", num_blocks=64)
    _, small = works_of([3], [0], 1)
    first = engine.runner.step(small)
    engine.runner.step(works_of([200], [0], 1)[1])
    assert engine.runner.step(small) == first
