"""Exactness: how texts and log-probabilities are judged, what is asked, and the engine alone against references."""

import json

import pytest

from bench.arms import Answer, Ask, answer, body, tokens_of
from bench.exactness import EDGES, sizes, spread
from bench.forced import forced_asks, forced_places
from bench.inprocess import Engine, InProcessArm
from bench.judging import Place, branch, branches, cacheable, place, verdict
from bench.references import Reference, references
from bench.texts import DISTINCT, cut, random_prompts
from bench.tiny_models import FAMILIES, NUM_BYTES, VOCAB, save_tiny
from coordinator.frontend.tokenizer import load_tokenizer
from pdserve.errors import PDServeError
from pdserve.model.spec import read_spec


def reference(tokens=(5, 6, 7), gaps=(1.0, 1.0, 1.0), prompt=(1, 2)):
    return Reference(
        prompt=prompt,
        tokens=tokens,
        gaps=gaps,
        top_ids=tuple((token, 90) for token in tokens),
        top_logprobs=tuple((-0.5, -1.5) for _ in tokens),
    )


def test_equal_texts_do_not_branch():
    assert branch(reference(), [5, 6, 7]) is None


def test_a_branch_is_where_the_first_token_differs():
    found = branch(reference(), [5, 9, 9])
    assert (found.step, found.wanted, found.got, found.kind) == (1, 6, 9, "mismatch")


def test_a_branch_at_a_small_gap_of_the_reference_is_a_near_tie():
    assert branch(reference(gaps=(1.0, 9e-4, 1.0)), [5, 9, 9]).kind == "near tie"


def test_a_gap_of_exactly_the_bound_excuses_nothing():
    assert branch(reference(gaps=(1.0, 1e-3, 1.0)), [5, 9, 9]).kind == "mismatch"


def test_a_small_gap_elsewhere_excuses_nothing():
    assert branch(reference(gaps=(1e-5, 1.0, 1e-5)), [5, 9, 9]).kind == "mismatch"


@pytest.mark.parametrize("tokens", [[], [5, 6], [5, 6, 7, 8]])
def test_a_text_of_another_length_is_a_mismatch_even_at_a_near_tie(tokens):
    assert branch(reference(gaps=(0.0, 0.0, 0.0)), tokens).kind == "mismatch"


def test_a_branch_says_where_it_is_in_one_line():
    text = str(branch(reference(), [5, 9, 9]))
    assert text == "mismatch: prompt of 2, token 1: 9, not 6; the reference's gap is 1"


def test_only_texts_that_branch_are_reported():
    assert [each.step for each in branches([reference(), reference()], [[5, 6, 7], [4, 6, 7]])] == [0]


def test_a_warm_cache_saves_whole_blocks_but_never_the_last_token():
    assert [cacheable([length], 16) for length in (1, 16, 17, 32, 33)] == [0, 0, 16, 16, 32]


def test_a_place_has_the_largest_difference_over_the_tokens_both_report():
    found = place(reference(), 0, {"a": -0.6, "b": -1.9, "c": -3.0}, {5: "a", 90: "b"})
    assert (found.difference, found.is_same_choice) == (pytest.approx(0.4), True)


def test_another_choice_is_one_whose_likeliest_spelling_differs():
    assert not place(reference(), 0, {"b": -0.6, "a": -0.7}, {5: "a", 90: "b"}).is_same_choice


def test_ids_of_one_spelling_are_not_compared():
    assert place(reference(), 0, {"a": -9.0}, {5: "a", 90: "a"}).difference == float("inf")


def a_place(gap, difference, is_same_choice):
    return Place(num_prompt=1, step=0, gap=gap, difference=difference, is_same_choice=is_same_choice)


def test_another_choice_is_excused_up_to_twice_the_largest_difference():
    places = [a_place(9.0, 0.25, True), a_place(0.5, 0.1, False), a_place(0.51, 0.1, False)]
    found = verdict(places)
    assert (found.largest, found.num_other_choices, found.refused) == (0.25, 2, (places[2],))


def test_every_edge_of_a_block_is_a_length_of_the_full_run():
    lengths = sizes(is_quick=False).lengths
    assert set(range(1, 101)) <= set(lengths)
    assert {16 * blocks + off for blocks in EDGES for off in (-1, 0, 1)} <= set(lengths)
    assert max(lengths) == 2001


def test_a_subset_is_spread_over_the_lengths_and_holds_the_longest():
    known = [reference(prompt=(0,) * length) for length in range(1, 101)]
    assert [len(each.prompt) for each in spread(known, 4)] == [100, 75, 50, 25]


def test_a_request_is_greedy_and_shows_its_tokens_unless_told_otherwise():
    fields = body(Ask(prompt=(1, 2), num_new=4), "m")
    assert (fields["temperature"], fields["ignore_eos"], fields["return_token_ids"]) == (0.0, True, True)
    assert not {"logprobs", "logit_bias", "cache_salt"} & set(fields)


def test_a_forced_token_is_a_bias_of_a_hundred():
    assert body(Ask(prompt=(1,), num_new=2, forced=7), "m")["logit_bias"] == {"7": 100}


def test_an_answer_is_read_from_a_completion():
    about = {"mode": "local", "phases_ms": {"queue": 1.0}}
    choice = {"token_ids": [3, 4], "logprobs": {"top_logprobs": [{"a": -1.0}, {"b": -2.0}]}}
    usage = {"prompt_tokens_details": {"cached_tokens": 16}}
    found = answer({"choices": [choice], "usage": usage, "pdserve": about})
    assert (found.tokens, found.cached_tokens, found.mode, len(found.top)) == ((3, 4), 16, "local", 2)


def test_one_failed_request_fails_the_part_with_its_reason():
    with pytest.raises(PDServeError, match="1 of 2 requests failed, the first with: status 503"):
        tokens_of([Answer(tokens=(1,)), Answer(tokens=(), error="status 503")])


def test_every_position_but_the_last_is_forced_once():
    asks = forced_asks(reference(), "s")
    assert [(list(ask.prompt), ask.forced, ask.num_new) for ask in asks] == [([1, 2], 5, 2), ([1, 2, 5], 6, 2)]


def test_prompts_have_their_lengths_and_distinct_beginnings():
    stream = [1] * 64 + list(range(500))
    cuts = cut(stream, [1, 20, 3, 40])
    assert [len(each) for each in cuts] == [1, 20, 3, 40]
    assert len({tuple(each[:DISTINCT]) for each in cuts}) == 4


def test_too_little_text_is_said():
    with pytest.raises(ValueError, match="100 tokens of text wanted, 10 are there"):
        cut(list(range(10)), [100])


def test_random_prompts_depend_on_the_seed_alone():
    assert random_prompts([3, 4], range(9), 1) == random_prompts([3, 4], range(9), 1)
    assert random_prompts([30], range(9), 1) != random_prompts([30], range(9), 2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return {family: save_tiny(family, folder / family, 0) for family in FAMILIES}


@pytest.fixture(scope="module")
def known(tiny, tmp_path_factory):
    """References of the llama3 model, their cache, and what was asked."""
    cache = tmp_path_factory.mktemp("cache")
    prompts = random_prompts([1, 17, 40], range(NUM_BYTES), 0)
    return references(tiny["llama3"], prompts, 8, say=lambda text: None, cache=cache), cache, prompts


def test_a_server_can_start_on_a_tiny_model(tiny):
    for directory in tiny.values():
        tokenizer, spec = load_tokenizer(directory), read_spec(directory)
        assert tokenizer.num_tokens == spec.vocab_size == VOCAB
        assert tokenizer.decode(tokenizer.encode("né 1")) == "né 1"


def test_references_are_greedy_and_as_long_as_asked(known):
    for each in known[0]:
        assert len(each.tokens) == len(each.gaps) == len(each.top_ids) == 8
        assert all(ids[0] == token for ids, token in zip(each.top_ids, each.tokens, strict=True))


def test_references_come_from_the_cache_the_second_time(tiny, known):
    found, cache, prompts = known
    before = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert references(tiny["llama3"], prompts, 8, say=pytest.fail, cache=cache) == found
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == before


def test_a_cached_reference_belongs_to_one_model_and_one_length(tiny, known):
    _, cache, prompts = known
    other = references(tiny["qwen3"], prompts[:1], 8, say=lambda text: None, cache=cache)
    longer = references(tiny["llama3"], prompts[:1], 9, say=lambda text: None, cache=cache)
    assert other[0].tokens != longer[0].tokens[:8]
    assert len(longer[0].tokens) == 9


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_alone_equals_transformers_in_chunks_and_in_a_batch(tiny, family, tmp_path):
    prompts = random_prompts([1, 16, 33], range(NUM_BYTES), 1)
    found = references(tiny[family], prompts, 8, say=lambda text: None, cache=tmp_path)
    arm = InProcessArm(Engine(tiny[family], dtype="float32", num_blocks=16), chunk=10)
    answers = arm.complete([Ask(prompt=prompt, num_new=8) for prompt in prompts])
    assert [each for each in branches(found, tokens_of(answers)) if each.kind == "mismatch"] == []


def test_seeded_sampling_is_the_same_alone_and_in_a_batch(tiny):
    arm = InProcessArm(Engine(tiny["qwen2"], dtype="float32", num_blocks=32))
    asks = [
        Ask(prompt=prompt, num_new=8, temperature=1.0, top_p=0.9, seed=seed)
        for seed, prompt in enumerate(random_prompts([4, 9, 20], range(NUM_BYTES), 2))
    ]
    assert tokens_of(arm.complete(asks)) == [arm.complete([ask])[0].tokens for ask in asks]


class Recorder:
    """An arm that answers forced questions with the reference's own numbers."""

    def __init__(self, reference, spell, first=None):
        self.reference, self.spell, self.first = reference, spell, first

    def complete(self, asks):
        return [self._answer(len(ask.prompt) - len(self.reference.prompt)) for ask in asks]

    def _answer(self, step):
        tops = zip(self.reference.top_ids[step : step + 2], self.reference.top_logprobs[step : step + 2], strict=True)
        top = tuple(dict(zip(map(self.spell, ids), shares, strict=True)) for ids, shares in tops)
        first = self.reference.tokens[step] if self.first is None else self.first
        return Answer(tokens=(first, self.reference.tokens[step + 1]), top=top)


def test_forced_places_show_every_position_from_both_sides(tiny, known):
    wanted = known[0][2]
    table = load_tokenizer(tiny["llama3"]).table
    from coordinator.frontend.logprobs import spelled

    arm = Recorder(wanted, lambda token: spelled(token, table))
    prefill, decode = forced_places(arm, tiny["llama3"], [wanted], "s", 3)
    assert [each.step for each in prefill] == list(range(7))
    assert [each.step for each in decode] == list(range(1, 8))
    assert verdict([*prefill, *decode]).largest == 0.0


def test_a_token_that_was_not_forced_is_an_error(tiny, known):
    with pytest.raises(PDServeError, match="was forced at step 0"):
        forced_places(Recorder(known[0][0], str, first=-1), tiny["llama3"], [known[0][0]], "s", 3)


def test_tiny_models_say_how_text_ends(tiny):
    for directory in tiny.values():
        assert read_spec(directory).eos_token_ids == (NUM_BYTES,)
        assert json.loads((directory / "tokenizer_config.json").read_text())["eos_token"] == "<|end|>"
