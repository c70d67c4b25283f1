"""Text to token ids from tokenizer.json."""

import pytest
from front_kit import SPECIALS, byte_level, model_folder, sentencepiece

from coordinator.frontend.tokenizer import TextTokenizer, load_tokenizer
from pdserve.errors import ModelError

BYTES = TextTokenizer(byte_level())
PIECES = TextTokenizer(sentencepiece())


def test_a_model_without_a_prefix_gets_none():
    assert BYTES.encode_prompt("hello") == BYTES.encode("hello")


def test_a_model_with_a_prefix_gets_it_once():
    assert PIECES.encode_prompt("hello")[:1] == [1]
    assert PIECES.encode_prompt("hello").count(1) == 1


def test_a_prompt_that_spells_the_prefix_gets_it_once():
    assert PIECES.encode_prompt("<s>hello").count(1) == 1


def test_a_rendered_chat_gets_no_prefix_but_its_own():
    assert PIECES.encode("<s>hello").count(1) == 1


def test_control_tokens_in_a_raw_prompt_are_control_tokens():
    assert BYTES.encode_prompt("<|im_start|>user")[0] == 1


@pytest.mark.parametrize("text", SPECIALS)
def test_plain_encoding_knows_no_control_token(text):
    ids = BYTES.encode_plain(text, is_first=True)
    assert min(ids) > 2
    assert BYTES.spell(ids) == text


def test_decoding_drops_special_tokens_and_spelling_shows_them():
    ids = [1, *BYTES.encode("hello"), 2]
    assert BYTES.decode(ids) == "hello"
    assert BYTES.spell(ids) == "<|im_start|>hello<|im_end|>"


def test_no_token_covers_more_characters_than_said():
    assert BYTES.chars_per_token == max(len(text) for text in [*SPECIALS, " quick"])
    assert PIECES.chars_per_token == 4 * len("\u2581hello")


def test_text_that_may_fit_is_left_to_the_tokenizer():
    assert BYTES.least_tokens("hello" * 10, limit=8) == 0
    assert BYTES.least_tokens("", limit=8) == 0


def test_more_characters_than_the_longest_tokens_could_cover_are_too_many_at_once():
    assert BYTES.least_tokens("x" * (8 * BYTES.chars_per_token + 1), limit=8) == 9


def test_of_a_long_text_only_a_beginning_is_tokenized(monkeypatch):
    definition = byte_level()
    definition["added_tokens"][1]["rstrip"] = True
    unbounded, text = TextTokenizer(definition), "0 1 2 3 " * 1000
    seen = []
    real = unbounded.encode
    monkeypatch.setattr(unbounded, "encode", lambda part: seen.append(len(part)) or real(part))
    assert 16 < unbounded.least_tokens(text, limit=16) <= len(real(text))
    assert seen == [16 * 12]


def test_a_long_text_of_long_tokens_is_left_to_the_tokenizer(monkeypatch):
    monkeypatch.setattr(BYTES, "encode", lambda part: [7] * (len(part) // 8))
    monkeypatch.setattr(BYTES, "chars_per_token", None)
    assert BYTES.least_tokens("x" * 10_000, limit=16) == 0


def test_a_tokenizer_that_swallows_text_has_no_such_bound():
    definition = byte_level()
    definition["added_tokens"][1]["rstrip"] = True
    assert TextTokenizer(definition).chars_per_token is None


def test_a_folder_without_a_tokenizer_is_an_error_of_the_model(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"model": {"type": "BPE"}}'])
def test_a_malformed_tokenizer_is_an_error_of_the_model(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match="is not a tokenizer"):
        load_tokenizer(tmp_path)


def test_a_good_folder_is_read(tmp_path):
    assert load_tokenizer(model_folder(tmp_path)).encode("hello") == BYTES.encode("hello")
