"""Our decoder against transformers: greedy text token for token in float32, close logits in bf16."""

import pytest
import torch
from model_kit import FAMILIES, Engine, prompts, reference, reference_greedy, save_tiny

from pdserve.model.runner import Work

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 70, 127)
NUM_NEW = 20


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """A checkpoint, the prompts and what transformers answers."""
    directory = save_tiny(request.param, tmp_path_factory.mktemp(request.param))
    model = reference(directory)
    asked = prompts(LENGTHS)
    return directory, asked, [reference_greedy(model, prompt, NUM_NEW) for prompt in asked]


def test_greedy_text_equals_transformers_when_prompts_run_alone(family):
    directory, asked, expected = family
    engine = Engine(directory)
    assert [engine.generate([prompt], NUM_NEW)[0] for prompt in asked] == expected
    assert len({tuple(answer) for answer in expected}) == len(expected)


def test_the_reference_kernels_say_the_same(family):
    directory, asked, expected = family
    assert Engine(directory, force="reference").generate(asked, NUM_NEW, chunk=32) == expected


def test_interpreted_triton_kernels_say_the_same(family):
    directory, asked, expected = family
    few = [LENGTHS.index(17), LENGTHS.index(33)]
    engine = Engine(directory, force="triton")
    assert engine.generate([asked[at] for at in few], 3, chunk=32) == [expected[at][:3] for at in few]


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 1000])
def test_greedy_text_equals_transformers_when_batched_in_chunks(family, chunk):
    directory, asked, expected = family
    assert Engine(directory).generate(asked, NUM_NEW, chunk=chunk) == expected


@pytest.mark.parametrize("block_size", [1, 8, 64])
def test_greedy_text_does_not_depend_on_the_block_size(family, block_size):
    directory, asked, expected = family
    engine = Engine(directory, block_size=block_size, num_blocks=2048 // block_size + 64)
    assert engine.generate(asked, NUM_NEW, chunk=24) == expected


def test_bf16_logits_are_close_to_transformers(family):
    directory, asked, _ = family
    model, engine = reference(directory, "bfloat16"), Engine(directory, dtype="bfloat16")
    exact = reference(directory, "float32")
    for prompt in asked:
        ours = engine.runner.logits([Work(tokens=prompt, start=0, block_table=engine.take(len(prompt)))])
        with torch.no_grad():
            theirs, truth = (each(torch.tensor([prompt])).logits[0].float() for each in (model, exact))
        assert (ours - truth).abs().max() <= 2.0 * (theirs - truth).abs().max() + 0.02
