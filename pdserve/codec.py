"""Dataclasses to msgpack arrays and back, with every type checked on the way in.

Owns the mapping from annotations to checkers, built once per class; knows no message. Allowed field types: bool, int,
float, str, bytes, dataclasses, `X | None`, and tuples of any of these, homogeneous (`tuple[X, ...]`) or fixed.
Invariant: `decode` returns a value of exactly the declared types or raises `MalformedError`; nothing else.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable
from typing import Any

import msgpack

MAX_BYTES = 64 * 1024 * 1024


class MalformedError(ValueError):
    """Bytes that are not a message of this protocol."""


Packer = Callable[[Any], Any]
Unpacker = Callable[[Any], Any]


def _same(value: Any) -> Any:
    return value


def _scalar(kind: type) -> Unpacker:
    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise MalformedError(f"expected {kind.__name__}, got {type(value).__name__}")
        return value

    return check


def _number(value: Any) -> float:
    if type(value) not in (int, float) or math.isnan(value):
        raise MalformedError(f"expected a number, got {value!r:.40}")
    return float(value)


def _array(value: Any, length: int | None = None) -> list[Any]:
    if type(value) is not list or (length is not None and len(value) != length):
        raise MalformedError(f"expected an array{'' if length is None else f' of {length}'}")
    return value


def _tuple_codec(arguments: tuple[Any, ...]) -> tuple[Packer, Unpacker]:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        if arguments[0] in (int, str, bytes, bool):
            kind = arguments[0]

            def unpack_plain(value: Any) -> Any:
                if not all(type(x) is kind for x in _array(value)):
                    raise MalformedError(f"expected an array of {kind.__name__}")
                return tuple(value)

            return _same, unpack_plain
        pack, unpack = _codec(arguments[0])
        return (lambda value: [pack(x) for x in value]), (lambda value: tuple(unpack(x) for x in _array(value)))
    codecs = [_codec(argument) for argument in arguments]

    def pack_fixed(value: Any) -> Any:
        return [pack(x) for (pack, _), x in zip(codecs, value, strict=True)]

    def unpack_fixed(value: Any) -> Any:
        return tuple(unpack(x) for (_, unpack), x in zip(codecs, _array(value, len(codecs)), strict=True))

    return pack_fixed, unpack_fixed


def _dataclass_codec(cls: type) -> tuple[Packer, Unpacker]:
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    codecs = [_codec(hints[name]) for name in names]
    steps = [(name, pack) for name, (pack, _) in zip(names, codecs, strict=True)]
    readers = [(name, unpack) for name, (_, unpack) in zip(names, codecs, strict=True)]

    def pack(value: Any) -> Any:
        return [step(getattr(value, name)) for name, step in steps]

    def unpack(value: Any) -> Any:
        fields = _array(value, len(readers))
        return cls(**{name: read(field) for (name, read), field in zip(readers, fields, strict=True)})

    return pack, unpack


def _codec(annotation: Any) -> tuple[Packer, Unpacker]:
    if annotation is float:
        return _same, _number
    if annotation in (bool, int, str, bytes):
        return _same, _scalar(annotation)
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return _dataclass_codec(annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple:
        return _tuple_codec(arguments)
    if origin in (types.UnionType, typing.Union) and len(arguments) == 2 and arguments[1] is type(None):
        pack, unpack = _codec(arguments[0])
        return (lambda x: None if x is None else pack(x)), (lambda x: None if x is None else unpack(x))
    raise TypeError(f"{annotation!r} is not a wire type")


class Registry:
    """The tag table of one protocol version."""

    def __init__(self, *, version: int, tags: dict[int, type]) -> None:
        self.version = version
        self._by_type = {cls: (tag, _dataclass_codec(cls)[0]) for tag, cls in tags.items()}
        self._by_tag = {tag: _dataclass_codec(cls)[1] for tag, cls in tags.items()}

    def encode(self, message: Any) -> bytes:
        tag, pack = self._by_type[type(message)]
        packed: bytes = msgpack.packb([tag, pack(message)])
        return packed

    def decode(self, data: bytes | memoryview) -> Any:
        """Raises `MalformedError` for anything that is not a message of this version."""
        if len(data) > MAX_BYTES:
            raise MalformedError(f"{len(data)} bytes, more than {MAX_BYTES}")
        try:
            body = msgpack.unpackb(data, strict_map_key=True, max_ext_len=0)
        except (ValueError, msgpack.UnpackException, RecursionError) as error:
            raise MalformedError(f"not msgpack: {error}") from None
        tag, value = _array(body, 2)
        unpack = self._by_tag.get(tag) if type(tag) is int else None
        if unpack is None:
            raise MalformedError(f"unknown tag {tag!r:.20}")
        return unpack(value)
