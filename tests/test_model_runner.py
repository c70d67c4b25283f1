"""Steps of mixed work: order, samples, block copies, and that a cache full of garbage cannot be seen."""

import numpy as np
import pytest
import torch
from model_kit import Engine, prompts, save_tiny

from pdserve.model.runner import SampleRow, Work
from pdserve.request import Sampling

GREEDY = Sampling(max_tokens=9, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny("smollm2", tmp_path_factory.mktemp("runner"))


@pytest.fixture
def engine(folder):
    return Engine(folder, num_blocks=128)


def draw(position, sampling=GREEDY, seed=0):
    return SampleRow(sampling=sampling, seed=seed, prompt=(), output=(), position=position)


def token_after(engine, prompt):
    """The greedy next token of a prompt that runs alone in fresh blocks."""
    work = Work(tokens=prompt, start=0, block_table=engine.take(len(prompt)), sample=(draw(len(prompt)),))
    return engine.runner.step([work])[0][0].token


def test_an_empty_step_does_nothing(engine):
    assert engine.runner.step([]) == []


def test_results_come_in_the_order_of_the_work_whatever_its_kind(engine):
    asked = prompts([20, 1, 33, 5])
    alone = [token_after(engine, prompt) for prompt in asked]
    tables = [engine.take(len(prompt)) for prompt in asked]
    engine.runner.step([Work(tokens=asked[0][:-1], start=0, block_table=tables[0])])
    works = [
        Work(tokens=asked[2], start=0, block_table=tables[2], sample=(draw(33),)),
        Work(tokens=asked[0][-1:], start=19, block_table=tables[0], sample=(draw(20),)),
        Work(tokens=asked[3][:4], start=0, block_table=tables[3]),
        Work(tokens=asked[1], start=0, block_table=tables[1], sample=(draw(1),)),
    ]
    drawn = engine.runner.step(works)
    assert [[sampled.token for sampled in samples] for samples in drawn] == [[alone[2]], [alone[0]], [], [alone[1]]]


def test_work_that_samples_nothing_still_writes_the_cache(engine):
    (prompt,) = prompts([40])
    table = engine.take(40)
    assert engine.runner.step([Work(tokens=prompt[:39], start=0, block_table=table)]) == [()]
    last = Work(tokens=prompt[39:], start=39, block_table=table, sample=(draw(40),))
    assert engine.runner.step([last])[0][0].token == token_after(engine, prompt)


def test_n_samples_of_a_prompt_are_drawn_from_one_row(engine):
    (prompt,) = prompts([17])
    warm = Sampling(max_tokens=9, temperature=1.0)
    samples = tuple(draw(17, warm, seed) for seed in range(4))
    works = [Work(tokens=prompt, start=0, block_table=engine.take(17), sample=samples)]
    together = [sampled.token for sampled in engine.runner.step(works)[0]]
    alone = [
        engine.runner.step([Work(tokens=prompt, start=0, block_table=engine.take(17), sample=(sample,))])[0][0].token
        for sample in samples
    ]
    assert together == alone and len(set(together)) > 1


def test_a_block_table_may_be_longer_than_the_context_and_an_array(engine):
    (prompt,) = prompts([18])
    table = np.array([*engine.take(18), 10**6, -1], np.int32)
    work = Work(tokens=prompt, start=0, block_table=table, sample=(draw(18),))
    assert engine.runner.step([work])[0][0].token == token_after(engine, prompt)


def test_a_block_table_that_is_too_short_is_a_broken_invariant(engine):
    with pytest.raises(AssertionError):
        engine.runner.step([Work(tokens=[1] * 17, start=0, block_table=[1])])


def test_garbage_in_other_blocks_and_past_the_end_cannot_be_seen(engine):
    (prompt,) = prompts([21])
    expected = token_after(engine, prompt)
    for garbage in (torch.nan, torch.inf, -torch.inf, 1e30):
        engine.runner.kv.fill_(garbage)
        assert token_after(engine, prompt) == expected


def test_only_the_blocks_of_the_work_are_written(engine):
    engine.runner.kv.fill_(7.0)
    engine.runner.step([Work(tokens=prompts([17])[0], start=0, block_table=[5, 3])])
    touched = {block for block in range(128) if not bool((engine.runner.kv[block] == 7.0).all())}
    assert touched == {3, 5}
    assert bool((engine.runner.kv[3, :, :, :, 1:] == 7.0).all())


def test_copied_blocks_let_samples_of_a_prompt_go_separate_ways(engine):
    (prompt,) = prompts([20])
    first, partial = engine.take(20)
    engine.runner.step([Work(tokens=prompt, start=0, block_table=[first, partial])])
    (copy,) = engine.take(1)
    engine.runner.copy_blocks([(partial, copy)])
    works = [
        Work(tokens=[token], start=20, block_table=[first, block], sample=(draw(21),))
        for token, block in ((50, partial), (60, copy))
    ]
    drawn = [samples[0].token for samples in engine.runner.step(works)]
    assert drawn == [token_after(engine, [*prompt, 50]), token_after(engine, [*prompt, 60])]


def test_logits_of_every_token_come_in_the_order_of_the_work(engine):
    long, short = prompts([19, 1])
    works = [Work(tokens=each, start=0, block_table=engine.take(len(each))) for each in (long, short)]
    logits = engine.runner.logits(works)
    assert logits.shape == (20, engine.spec.vocab_size) and logits.dtype == torch.float32
    assert [int(logits[18].argmax()), int(logits[19].argmax())] == [token_after(engine, each) for each in (long, short)]


@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5}])
def test_seeded_text_is_the_same_alone_in_a_batch_and_in_chunks(engine, params):
    asked = prompts([3, 16, 30, 47])
    together = engine.generate(asked, 10, chunk=9, seed=77, **params)
    assert [engine.generate([prompt], 10, seed=77, **params)[0] for prompt in asked] == together


def test_a_prompt_continued_elsewhere_draws_what_it_would_have_drawn_here(engine):
    (prompt,) = prompts([12])
    whole = engine.generate([prompt], 12, seed=5, temperature=1.0)[0]
    table = engine.take(30)
    known = prompt + whole[:6]
    sampling = Sampling(max_tokens=12, temperature=1.0, seed=5)
    row = SampleRow(sampling=sampling, seed=5, prompt=prompt, output=whole[:6], position=len(known))
    (drawn,) = engine.runner.step([Work(tokens=known, start=0, block_table=table, sample=(row,))])
    assert drawn[0].token == whole[6]
