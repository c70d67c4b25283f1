"""Token ids to text, one token at a time, without ever showing part of a character.

Owns the bytes each token stands for and the decoding state of one output. Byte-level and byte-fallback vocabularies
are tables; anything else is decoded through a short window. Invariant: the pieces of `push` and `flush` together are
the decoding of all ids without special tokens, at constant cost per token.
"""

from __future__ import annotations

import codecs
from typing import Any, Literal, Protocol

from tokenizers import Tokenizer

Kind = Literal["byte_level", "byte_fallback", "window"]
MAX_HELD_TOKENS = 4  # by the window: a character is at most four bytes, so more of them will never complete it
_SPACE = "\u2581"  # how SentencePiece writes a space


class Detokenizer(Protocol):
    """State of one output."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


class TokenTable:
    """What each token of a vocabulary stands for, worked out on first use."""

    def __init__(self, tokenizer: Tokenizer, decoder: dict[str, Any] | None) -> None:
        self.kind, self.strips_first_space = _kind_of(decoder)
        self._tokenizer = tokenizer
        self.special_ids = frozenset(
            token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special
        )
        self._bytes: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        """The token's bytes, special tokens spelled out; empty for ids without a token."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._look_up(token)
        return found

    def decode_window(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def _look_up(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        if self.kind == "byte_level":
            return _byte_level(text)
        if self.kind == "byte_fallback":
            return _byte_fallback(text)
        return self._tokenizer.decode([token], skip_special_tokens=False).encode()


def new_detokenizer(table: TokenTable) -> Detokenizer:
    return _Window(table) if table.kind == "window" else _Bytes(table)


def decode_all(table: TokenTable, tokens: list[int] | tuple[int, ...]) -> str:
    detokenizer = new_detokenizer(table)
    return "".join([*map(detokenizer.push, tokens), detokenizer.flush()])


class _Bytes:
    """An incremental UTF-8 decoder holds back at most three bytes, and never bytes that cannot become a character."""

    __slots__ = ("_decoder", "_is_at_start", "_table")

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_at_start = table.strips_first_space

    def push(self, token: int) -> str:
        if token in self._table.special_ids:
            return ""
        return self._begin(self._decoder.decode(self._table.bytes_of(token)))

    def flush(self) -> str:
        return self._begin(self._decoder.decode(b"", final=True))

    def _begin(self, text: str) -> str:
        if self._is_at_start and text:
            self._is_at_start = False
            return text.removeprefix(" ")
        return text


class _Window:
    """Decodes the tokens since the last certain boundary together with the ones just before it.

    The tokens before give context to decoders that treat the first token differently.
    """

    __slots__ = ("_fresh", "_shown", "_table")

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._shown: list[int] = []  # context, already shown
        self._fresh: list[int] = []  # not shown yet

    def push(self, token: int) -> str:
        if token in self._table.special_ids:
            return ""
        self._fresh.append(token)
        text = self._difference()
        if text.endswith("\ufffd") and len(self._fresh) < MAX_HELD_TOKENS:
            return ""
        return self._show(text)

    def flush(self) -> str:
        return self._show(self._difference()) if self._fresh else ""

    def _difference(self) -> str:
        before = self._table.decode_window(self._shown) if self._shown else ""
        return self._table.decode_window(self._shown + self._fresh)[len(before) :]

    def _show(self, text: str) -> str:
        self._shown, self._fresh = self._fresh, []
        return text


def _kind_of(decoder: dict[str, Any] | None) -> tuple[Kind, bool]:
    """Which table fits tokenizer.json's decoder, and whether one leading space of the whole output is dropped."""
    if decoder is None:
        return "window", False
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    names = [step["type"] for step in steps if step["type"] != "Fuse"]
    if names == ["ByteLevel"]:
        return "byte_level", False
    if names in (["Replace", "ByteFallback"], ["Replace", "ByteFallback", "Strip"]):
        replace, strip = steps[0], steps[-1] if names[-1] == "Strip" else None
        is_plain = replace["pattern"] == {"String": _SPACE} and replace["content"] == " "
        if is_plain and (strip is None or (strip["content"], strip["start"], strip["stop"]) == (" ", 1, 0)):
            return "byte_fallback", strip is not None
    return "window", False


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes (Radford et al., 2019): printable ones stand for themselves, others lie above 255."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _byte_level(text: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in text])
    except KeyError:  # an added token, which is spelled as itself
        return text.encode()


def _byte_fallback(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes([int(text[3:5], 16)])
        except ValueError:
            pass
    return text.replace(_SPACE, " ").encode()
