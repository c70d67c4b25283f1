"""Token ids to text, one at a time."""

import json

import pytest
from front_kit import SPECIALS, byte_level, sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from coordinator.frontend.detokenizer import TokenTable, decode_all, new_detokenizer

HARD = "삼겹살 漢字 é 🧑‍🚀 👩‍👩‍👧"


def table_of(definition):
    tokenizer = Tokenizer.from_str(json.dumps(definition))
    return tokenizer, TokenTable(tokenizer, definition["decoder"])


BYTE_LEVEL, BYTE_TABLE = table_of(byte_level())
PIECES, PIECE_TABLE = table_of(sentencepiece())
BYTES = {BYTE_TABLE.bytes_of(i)[0]: i for i in range(3, 400) if len(BYTE_TABLE.bytes_of(i)) == 1}


def deltas(table, ids):
    detokenizer = new_detokenizer(table)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


def test_byte_level_and_byte_fallback_vocabularies_are_tables():
    assert (BYTE_TABLE.kind, PIECE_TABLE.kind) == ("byte_level", "byte_fallback")


@pytest.mark.parametrize("text", [HARD, "", "plain", "\n\n  x\t", "a\u2028b\x00c", "🦊" * 5])
def test_no_delta_holds_part_of_a_character(text):
    ids = BYTE_LEVEL.encode(text).ids
    assert "".join(deltas(BYTE_TABLE, ids)) == BYTE_LEVEL.decode(ids) == text
    assert not any("\ufffd" in delta for delta in deltas(BYTE_TABLE, ids))


def test_a_character_appears_with_its_last_byte():
    ids = [BYTES[byte] for byte in "é".encode()]
    assert deltas(BYTE_TABLE, ids) == ["", "é", ""]


def test_special_tokens_have_no_text():
    ids = [1, *BYTE_LEVEL.encode("hello").ids, 2, 0]
    assert "".join(deltas(BYTE_TABLE, ids)) == "hello"


def test_special_tokens_inside_a_character_do_not_break_it():
    first, second = (BYTES[byte] for byte in "é".encode())
    assert "".join(deltas(BYTE_TABLE, [first, 2, second])) == "é"


def test_lone_bytes_are_not_held_back_for_ever():
    shown = deltas(BYTE_TABLE, [BYTES[0x80]] * 500)
    assert shown == ["\ufffd"] * 500 + [""]


def test_bytes_that_might_begin_a_character_are_held_one_at_a_time():
    shown = deltas(BYTE_TABLE, [BYTES[0xF0]] * 500)
    assert shown == ["", *["\ufffd"] * 500]


def test_an_incomplete_tail_comes_out_at_the_end():
    ids = [BYTES[byte] for byte in "🦊".encode()[:3]]
    assert deltas(BYTE_TABLE, ids) == ["", "", "", "\ufffd"]


def test_ids_without_a_token_have_no_text():
    assert deltas(BYTE_TABLE, [499, 100000]) == ["", "", ""]


@given(st.lists(st.integers(0, 399), max_size=60))
def test_byte_level_deltas_add_up_to_the_decoding_of_all_ids(ids):
    assert "".join(deltas(BYTE_TABLE, ids)) == BYTE_LEVEL.decode(ids, skip_special_tokens=True)


@given(st.text(max_size=30).map(lambda text: text.replace("\u2581", " ")))  # how the pieces spell a space
def test_byte_fallback_deltas_add_up_to_the_decoding_of_all_ids(text):
    ids = PIECES.encode(text).ids
    assert "".join(deltas(PIECE_TABLE, ids)) == PIECES.decode(ids, skip_special_tokens=True) == text


def test_one_leading_space_is_dropped_as_the_decoder_says():
    ids = PIECES.encode("hello world").ids
    assert deltas(PIECE_TABLE, ids) == ["", "hello", " world", ""]
    assert deltas(PIECE_TABLE, PIECES.encode("  hello", add_special_tokens=False).ids)[0] in ("", "  ", " ")


def test_bytes_of_a_token_are_known_for_log_probabilities():
    fox = PIECES.encode("🦊", add_special_tokens=False).ids
    assert b"".join(map(PIECE_TABLE.bytes_of, fox)).decode() == " 🦊"
    assert BYTE_TABLE.bytes_of(1) == SPECIALS[1].encode()


def test_an_unknown_decoder_goes_through_a_window():
    definition = sentencepiece(prepend="always")
    definition["decoder"] = {
        "type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True,
    }  # fmt: skip
    tokenizer, table = table_of(definition)
    ids = tokenizer.encode("hello world hello").ids
    assert table.kind == "window"
    assert deltas(table, ids) == ["", "hello", " world", " hello", ""]


def test_a_window_holds_a_bounded_number_of_tokens():
    definition = sentencepiece()
    definition["decoder"]["decoders"][0]["content"] = "  "  # no longer a table
    tokenizer, table = table_of(definition)
    lone = tokenizer.token_to_id("<0x80>")
    shown = deltas(table, [lone] * 40)
    assert table.kind == "window"
    assert "".join(shown) == "\ufffd" * 40
    assert all(len(delta) <= 4 for delta in shown)


def test_decode_all_is_the_sum_of_the_deltas():
    ids = BYTE_LEVEL.encode(HARD).ids
    assert decode_all(BYTE_TABLE, ids) == HARD
