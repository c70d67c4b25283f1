"""From a parsed request to what the core is sent: lengths, defaults, seeds."""

import pytest
from front_kit import CHATML, byte_level

from coordinator.frontend.chat import ChatTemplate
from coordinator.frontend.prepare import Preparer, seed_source
from coordinator.frontend.tokenizer import TextTokenizer
from coordinator.frontend.validate import Model, parse
from pdserve.errors import RequestError

TOKENIZER = TextTokenizer(byte_level())
MODEL = Model(served_names=("tiny",), vocab_size=512, eos_token_ids=(2,), max_model_len=1000)
PREPARER = Preparer(TOKENIZER, ChatTemplate(CHATML, variables={}, tokenizer=TOKENIZER), vocab_size=512, limit_s=5)


def prepare(*, limit=128, seed=7, preparer=PREPARER, **fields):
    return preparer.prepare(parse("completion", {"model": "tiny", **fields}, MODEL), limit=limit, seed=seed)


def refused(**fields):
    with pytest.raises(RequestError) as caught:
        prepare(**fields)
    return caught.value


@pytest.mark.parametrize("num_prompt", [1, 126, 127])
def test_without_max_tokens_the_answer_may_fill_the_context(num_prompt):
    (prepared,) = prepare(prompt=[5] * num_prompt)
    assert prepared.sampling.max_tokens == 128 - num_prompt


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(126, 1), (126, 2), (127, 1), (1, 127)])
def test_what_just_fits_is_served(num_prompt, max_tokens):
    assert prepare(prompt=[5] * num_prompt, max_tokens=max_tokens)[0].sampling.max_tokens == max_tokens


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(126, 3), (127, 2), (128, 1), (129, 1), (5, 10**9)])
def test_what_does_not_fit_is_refused_with_the_limit_and_both_counts(num_prompt, max_tokens):
    error = refused(prompt=[5] * num_prompt, max_tokens=max_tokens)
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert error.param == ("max_tokens" if num_prompt < 128 else "prompt")
    assert all(str(number) in error.message for number in (128, num_prompt, max_tokens))


@pytest.mark.parametrize("num_prompt", [128, 129, 999])
def test_a_prompt_that_leaves_no_room_is_refused(num_prompt):
    error = refused(prompt=[5] * num_prompt)
    assert error.param == "prompt"
    assert "128" in error.message and str(num_prompt) in error.message


def test_the_field_that_asked_for_too_much_is_named():
    assert refused(prompt=[5] * 100, max_completion_tokens=29).param == "max_completion_tokens"


def test_min_tokens_beyond_what_is_left_are_refused():
    assert refused(prompt=[5] * 100, min_tokens=29).param == "min_tokens"
    assert prepare(prompt=[5] * 100, min_tokens=28)


def test_one_prompt_too_long_refuses_all():
    assert refused(prompt=[[5], [5] * 128]).code == "context_length_exceeded"


def test_text_and_its_ids_are_the_same_prompt():
    ids = TOKENIZER.encode("hello world")
    assert prepare(prompt="hello world")[0].prompt == prepare(prompt=ids)[0].prompt == tuple(ids)


def test_a_single_token_is_a_prompt():
    assert prepare(prompt="hello", max_tokens=1)[0].prompt == (TOKENIZER.encode("hello")[0],)


def test_every_prompt_has_the_same_sampling():
    first, second = prepare(prompt=["hello", "hello world"], max_tokens=5, n=3)
    assert first.sampling == second.sampling
    assert (first.sampling.n, first.sampling.seed) == (3, 7)


def test_a_prompt_with_far_too_many_characters_is_refused_without_tokenizing_it():
    class Untouchable:
        def least_tokens(self, text, *, limit):
            assert (len(text), limit) == (128 * 13 + 1, 128)
            return 129

        def encode_prompt(self, text):
            raise AssertionError("tokenized")

    preparer = Preparer(Untouchable(), None, vocab_size=512, limit_s=5)
    with pytest.raises(RequestError, match="at least 129") as caught:
        prepare(prompt="x" * (128 * 13 + 1), preparer=preparer)
    assert caught.value.code == "context_length_exceeded"


def test_tokens_the_model_has_no_rows_for_are_refused():
    small = Preparer(TOKENIZER, PREPARER._template, vocab_size=10, limit_s=5)
    with pytest.raises(RequestError, match="the model does not have"):
        prepare(prompt="hello", preparer=small)


def test_chat_and_long_text_are_work_for_a_thread():
    chat = parse("chat", {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}, MODEL)
    assert not PREPARER.is_quick(chat)
    for prompt, is_quick in (("a", True), ([5] * 900, True), ("a" * 3000, False), (["a" * 1500] * 2, False)):
        assert PREPARER.is_quick(parse("completion", {"model": "tiny", "prompt": prompt}, MODEL)) is is_quick


def test_seeds_are_64_bits_and_follow_the_server_s_seed():
    first, again, other = seed_source(3), seed_source(3), seed_source(4)
    drawn = [first() for _ in range(20)]
    assert drawn == [again() for _ in range(20)]
    assert drawn[0] != other()
    assert all(0 <= seed < 2**64 for seed in drawn)
    assert seed_source(None)() != seed_source(None)()
