"""Text to token ids, from a model folder's tokenizer.json; no torch, no transformers.

Owns the tokenizer in its two readings: control tokens recognized, or spelled out as plain text. Invariant: encoding
is thread-safe and leaves no state, so big texts may be encoded in any thread.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from coordinator.frontend.detokenizer import TokenTable, decode_all
from pdserve.errors import ModelError

_USUAL_CHARS = 12  # of a token: few texts have more, on average


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlToken:
    """A special token and how it treats the text beside it."""

    id: int
    text: str
    swallows_left: bool  # white space before it
    swallows_right: bool
    is_single_word: bool  # only between non-word characters


class TextTokenizer:
    def __init__(self, definition: dict[str, Any]) -> None:
        text = json.dumps(definition)
        self._tokenizer = Tokenizer.from_str(text)
        self._plain = _spelling_out(text)
        rest = json.dumps(_without_first_prefix(definition))
        self._plain_rest = self._plain if rest == text else _spelling_out(rest)
        self._prefix = self.encode("", adds_prefix=True)
        self.table = TokenTable(self._tokenizer, definition.get("decoder"))
        self.controls = _control_tokens(self._tokenizer)
        self.num_tokens = self._tokenizer.get_vocab_size()
        self.chars_per_token = _chars_per_token(self._tokenizer, definition)

    def encode_prompt(self, text: str) -> list[int]:
        """A raw prompt: control tokens are recognized, and the model's own prefix is added exactly once."""
        ids = self.encode(text, adds_prefix=True)
        return ids[1:] if len(self._prefix) == 1 and ids[:2] == self._prefix * 2 else ids

    def encode(self, text: str, *, adds_prefix: bool = False) -> list[int]:
        """As the template or the caller wrote it: control tokens are recognized."""
        return _ids(self._tokenizer, text, adds_prefix=adds_prefix)

    def encode_plain(self, text: str, *, is_first: bool) -> list[int]:
        """Control tokens are text like any other. `is_first`: nothing comes before this text."""
        return _ids(self._plain if is_first else self._plain_rest, text, adds_prefix=False)

    def least_tokens(self, text: str, *, limit: int) -> int:
        """More than `limit` when `text` surely has more, without tokenizing all of it; else 0.

        Two bounds: no token covers more than so many characters; and a beginning that alone has twice the limit is not
        brought under it by what follows, since what follows changes the tokens of the last word or so only.
        """
        if self.chars_per_token is not None and len(text) > limit * self.chars_per_token:
            return len(text) // self.chars_per_token + 1
        if len(text) <= 2 * limit * _USUAL_CHARS:
            return 0
        num_tokens = len(self.encode(text[: limit * _USUAL_CHARS]))
        return num_tokens // 2 if num_tokens > 2 * limit + 1 else 0

    def decode(self, tokens: list[int]) -> str:
        return decode_all(self.table, tokens)

    def spell(self, tokens: list[int]) -> str:
        """Decoding with special tokens spelled out."""
        return b"".join(map(self.table.bytes_of, tokens)).decode(errors="replace")


def load_tokenizer(model_dir: Path) -> TextTokenizer:
    """ModelError in one line when the folder's tokenizer cannot be used."""
    path = model_dir / "tokenizer.json"
    try:
        return TextTokenizer(json.loads(path.read_text(encoding="utf-8")))
    except OSError:
        raise ModelError(f"{path} cannot be read; the front end needs it to turn text into tokens") from None
    except Exception as error:  # noqa: BLE001  the tokenizers library raises bare Exceptions for malformed files
        raise ModelError(f"{path} is not a tokenizer: {str(error)[:200]}") from None


def control_pattern(controls: tuple[ControlToken, ...]) -> re.Pattern[str] | None:
    """Finds control tokens as the tokenizer does: leftmost, then longest."""
    if not controls:
        return None
    longest_first = sorted((control.text for control in controls), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)))


def _ids(tokenizer: Tokenizer, text: str, *, adds_prefix: bool) -> list[int]:
    # the batch call lets other threads run meanwhile; `encode` would stop the event loop for as long as it takes
    return tokenizer.encode_batch_fast([text], add_special_tokens=adds_prefix)[0].ids


def _spelling_out(definition: str) -> Tokenizer:
    tokenizer = Tokenizer.from_str(definition)
    tokenizer.encode_special_tokens = True
    return tokenizer


def _without_first_prefix(definition: dict[str, Any]) -> dict[str, Any]:
    """The same tokenizer for text in the middle: a Metaspace that marks only the first word marks none."""

    def rewrite(node: Any) -> Any:
        if isinstance(node, dict):
            changed = {key: rewrite(value) for key, value in node.items()}
            if changed.get("type") == "Metaspace" and changed.get("prepend_scheme") == "first":
                changed["prepend_scheme"] = "never"
            return changed
        return [rewrite(value) for value in node] if isinstance(node, list) else node

    return definition | {"pre_tokenizer": rewrite(definition.get("pre_tokenizer"))}


def _control_tokens(tokenizer: Tokenizer) -> tuple[ControlToken, ...]:
    return tuple(
        ControlToken(
            id=token,
            text=added.content,
            swallows_left=added.lstrip,
            swallows_right=added.rstrip,
            is_single_word=added.single_word,
        )
        for token, added in sorted(tokenizer.get_added_tokens_decoder().items())
        if added.special and added.content
    )


def _chars_per_token(tokenizer: Tokenizer, definition: dict[str, Any]) -> int | None:
    """No token covers more characters of a prompt than this; None where there is no such bound."""
    model = definition.get("model") or {}
    swallows = any(added.lstrip or added.rstrip for added in tokenizer.get_added_tokens_decoder().values())
    if swallows or (model.get("unk_token") is not None and not model.get("byte_fallback")):
        return None
    longest = max(map(len, tokenizer.get_vocab()), default=1)
    return longest * (4 if definition.get("normalizer") else 1)  # a normalizer may join characters
