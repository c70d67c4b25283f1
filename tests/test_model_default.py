"""The default model itself: its files, its shape, and its greedy text against transformers on real prompts."""

import json
from pathlib import Path

import pytest
from model_kit import Engine, reference, reference_greedy
from tokenizers import Tokenizer

from pdserve.errors import ModelError
from pdserve.model.spec import read_spec
from pdserve.model.store import DEFAULT_MODEL, resolve

VECTORS = Path(__file__).parent / "data" / "tokenizer_smollm2.json"
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "<|im_start|>user\nName three rivers in Europe.<|im_end|>\n<|im_start|>assistant\n",
    "In 1969, two people walked on the Moon. Their names were",
    "Once upon a time there was a fox. " * 9,
)


@pytest.fixture(scope="module")
def directory():
    try:
        return resolve(DEFAULT_MODEL)
    except ModelError as error:
        pytest.skip(f"the default model is not at hand: {error}")


@pytest.fixture(scope="module")
def tokenizer(directory):
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    return tokenizer


def test_the_spec_is_that_of_smollm2_135m(directory):
    spec = read_spec(directory)
    assert (spec.hidden_size, spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (576, 30, 9, 3, 64)
    assert (spec.vocab_size, spec.max_positions, spec.tied_embeddings) == (49152, 8192, True)
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2,))


def test_a_thousand_texts_encode_as_llama_cpp_encodes_them(tokenizer):
    vectors = json.loads(VECTORS.read_text())
    assert len({text for text, _ in vectors}) == 1000
    assert [text for text, ids in vectors if tokenizer.encode(text, add_special_tokens=False).ids != ids] == []


def test_the_vectors_notice_a_lost_digit_splitter(tokenizer):
    lossy = Tokenizer.from_str(tokenizer.to_str())
    lossy.pre_tokenizer = tokenizer.pre_tokenizer[1]
    vectors = json.loads(VECTORS.read_text())
    assert sum(lossy.encode(text, add_special_tokens=False).ids != ids for text, ids in vectors) > 100


def test_no_token_is_added_in_front(tokenizer):
    assert tokenizer.encode("Hello").ids == tokenizer.encode("Hello", add_special_tokens=False).ids
    assert tokenizer.get_vocab_size() == 49152


def test_the_first_ids_are_the_control_tokens(tokenizer):
    assert [tokenizer.id_to_token(i) for i in range(3)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def test_the_chat_template_is_kept(directory):
    assert "<|im_start|>" in (directory / "chat_template.jinja").read_text()


def test_greedy_text_equals_transformers_in_float32(directory):
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    asked = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    expected = [reference_greedy(model, prompt, 24) for model in [reference(directory)] for prompt in asked]
    engine = Engine(directory, num_blocks=64)
    assert engine.generate(asked, 24, chunk=48) == expected
    assert tokenizer.decode(expected[0]).startswith(" Paris")
