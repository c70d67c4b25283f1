"""Readers for the fields of a JSON object that a stranger sent.

Owns what counts as a number, a text or a list; knows no field's meaning. Invariant: every reader returns a value of
the stated type within the stated bounds, the default for absent and null, or raises a RequestError naming the field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from pdserve.errors import RequestError

_SHOWN_CHARS = 40


def shown(value: object) -> str:
    """A short rendering of a bad value for an error message."""
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


def refuse(name: str, wanted: str, value: object) -> RequestError:
    return RequestError(f"'{name}' must be {wanted}, not {shown(value)}", param=name, code="invalid_value")


def is_integer(value: object) -> bool:
    return type(value) is int


def is_text(value: object) -> bool:
    """A string that has a UTF-8 form: JSON's escapes can spell lone surrogates, which have none."""
    if not isinstance(value, str):
        return False
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:
        return False


class Fields:
    """One JSON object, remembering which of its names were asked for."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = body
        self._asked: set[str] = set()

    def value(self, name: str) -> Any:
        """Whatever was sent; None when absent."""
        self._asked.add(name)
        return self._body.get(name)

    def mark(self, names: Iterable[str]) -> None:
        self._asked.update(names)

    def unasked(self) -> tuple[str, ...]:
        return tuple(name for name, value in self._body.items() if name not in self._asked and value is not None)

    def number(self, name: str, low: float, high: float, default: float) -> float:
        value = self.value(name)
        if value is None:
            return default
        return check_number(name, value, low, high)

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.value(name)
        if value is None:
            return None
        if not is_integer(value) or not low <= value <= high:
            raise refuse(name, f"an integer from {low} to {high}", value)
        return int(value)

    def boolean(self, name: str) -> bool:
        value = self.value(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise refuse(name, "true or false", value)
        return value

    def text(self, name: str, max_chars: int) -> str | None:
        value = self.value(name)
        if value is None:
            return None
        if not is_text(value) or len(value) > max_chars:
            raise refuse(name, f"a string of at most {max_chars} characters", value)
        return str(value)

    def token_ids(self, name: str, *, vocab_size: int, max_items: int) -> tuple[int, ...]:
        value = self.value(name)
        if value is None:
            return ()
        if not isinstance(value, list) or len(value) > max_items:
            raise refuse(name, f"a list of at most {max_items} token ids", value)
        return check_token_ids(name, value, vocab_size)


def check_number(name: str, value: object, low: float, high: float) -> float:
    # NaN fails every comparison, so it is out of range too
    if type(value) not in (int, float) or not low <= value <= high:  # type: ignore[operator]
        raise refuse(name, f"a number from {low:g} to {high:g}", value)
    number = float(value)  # type: ignore[arg-type]
    assert math.isfinite(number), (name, number)
    return number


def check_token_ids(name: str, ids: list[Any], vocab_size: int) -> tuple[int, ...]:
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise refuse(name, f"token ids, integers from 0 to {vocab_size - 1}", token)
    return tuple(ids)
