"""What a folder of safetensors holds: names, shapes, where the bytes are, and a digest of them.

Owns the safetensors header format; reads no tensor into memory and needs no torch.
Invariant: a `Checkpoint` that exists has readable headers, and every tensor lies within its file.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.errors import ModelError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SERVED_DTYPES = ("BF16", "F16", "F32")
_SAMPLE_BYTES = 4096
_MAX_HEADER_BYTES = 100_000_000
_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
_ITEM_BYTES |= {"I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    file: Path
    dtype: str  # as safetensors spells it: BF16, F16, F32
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    directory: Path
    tensors: Mapping[str, TensorEntry]

    def digest(self) -> bytes:
        """Of every name, shape and dtype, and of the first and middle 4 KiB of every tensor; cheap for any size."""
        hasher = hashlib.blake2b(digest_size=16)
        for file in sorted({entry.file for entry in self.tensors.values()}):
            with file.open("rb") as handle:
                for name, entry in sorted(self.tensors.items()):
                    if entry.file != file:
                        continue
                    hasher.update(repr((name, entry.dtype, entry.shape)).encode())
                    for offset in (entry.start, (entry.start + entry.end) // 2):
                        handle.seek(offset)
                        hasher.update(handle.read(min(_SAMPLE_BYTES, entry.end - offset)))
        return hasher.digest()

    def require(self, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> None:
        """Raise ModelError unless every named tensor is there with the given shape."""
        for name, shape in shapes:
            entry = self.tensors.get(name)
            if entry is None:
                raise ModelError(f"{self.directory}: tensor {name} is missing from the weights")
            if entry.shape != shape:
                raise ModelError(f"{self.directory}: tensor {name} has shape {list(entry.shape)}, not {list(shape)}")
            if entry.dtype not in SERVED_DTYPES:
                raise ModelError(
                    f"{self.directory}: tensor {name} is {entry.dtype}; served are {', '.join(SERVED_DTYPES)}"
                )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model folder; anything else is a ModelError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent}: {path.name} is missing") from None
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def open_checkpoint(directory: Path) -> Checkpoint:
    """Read the headers of the folder's safetensors: the indexed shards, or the single file."""
    tensors: dict[str, TensorEntry] = {}
    for file in _files(directory):
        tensors.update(_read_header(file))
    return Checkpoint(directory=directory, tensors=tensors)


def _files(directory: Path) -> list[Path]:
    if (directory / SINGLE_NAME).is_file():
        return [directory / SINGLE_NAME]
    if (directory / INDEX_NAME).is_file():
        weight_map = read_json(directory / INDEX_NAME).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{directory / INDEX_NAME} has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            if Path(name).name != name or not (directory / name).is_file():
                raise ModelError(f"{directory}: {name}, named by {INDEX_NAME}, is missing")
        return [directory / name for name in names]
    if any(directory.glob("*.bin")) or any(directory.glob("*.pth")):
        raise ModelError(f"{directory} holds weights in another format; only safetensors are served")
    raise ModelError(f"{directory} holds no weights ({SINGLE_NAME} or {INDEX_NAME})")


def _read_header(file: Path) -> dict[str, TensorEntry]:
    """Layout: u64 little-endian header size, JSON header, then the bytes that the header's offsets count from."""
    try:
        size = file.stat().st_size
        with file.open("rb") as handle:
            prefix = handle.read(8)
            header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if header_bytes > min(size - 8, _MAX_HEADER_BYTES):
                raise ModelError(f"{file} is corrupt or truncated: its header does not fit in the file")
            header = json.loads(handle.read(header_bytes))
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ModelError(f"{file} is corrupt: its header is not JSON") from None
    if not isinstance(header, dict):
        raise ModelError(f"{file} is corrupt: its header is not a JSON object")
    header.pop("__metadata__", None)
    return {name: _entry(file, name, field, 8 + header_bytes, size) for name, field in header.items()}


def _entry(file: Path, name: str, field: Any, base: int, file_bytes: int) -> TensorEntry:
    try:
        start, end = (base + int(offset) for offset in field["data_offsets"])
        shape = tuple(int(extent) for extent in field["shape"])
        dtype = str(field["dtype"])
    except (KeyError, TypeError, ValueError):
        raise ModelError(f"{file} is corrupt: the header entry of {name} is malformed") from None
    if not base <= start <= end <= file_bytes:
        raise ModelError(f"{file} is corrupt or truncated: {name} ends at byte {end} of {file_bytes}")
    if dtype in _ITEM_BYTES and end - start != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise ModelError(f"{file} is corrupt: {name} has {end - start} bytes for shape {list(shape)} of {dtype}")
    return TensorEntry(file=file, dtype=dtype, shape=shape, start=start, end=end)
