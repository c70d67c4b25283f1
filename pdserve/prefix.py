"""Block identity: chained digests of token prefixes, and the index from digest to block.

Owns how a block is named and which digest is cached where; does not own who holds a block (blocks.py).
Invariant: a digest names one token prefix under one set of extras, equal in every process and after restart,
and a look-up is a hit only if the block's token ids are the ones asked for.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

DIGEST_BYTES = 16
_PERSON = b"pdserve.prefix.1"
_TOKEN = "I" if array("I").itemsize == 4 else "L"


def seed_extras(**fields: str | None) -> bytes:
    """Everything besides tokens that decides whether KV may be shared: `seed_extras(model=..., cache_salt=...)`.

    Each field is its name and its value, both length-prefixed, in order of name: no two sets of fields are equal
    bytes. None leaves a field out.
    """
    parts = []
    for name in sorted(fields):
        value = fields[name]
        if value is not None:
            for text in (name, value):
                raw = text.encode()
                parts.append(struct.pack("<I", len(raw)) + raw)
    return b"".join(parts)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32. Raises OverflowError for an id that is none."""
    packed = array(_TOKEN, tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def block_digests(tokens: Sequence[int], block_size: int, extras: bytes) -> list[bytes]:
    """One digest per full block: blake2b of the parent's digest and the block's token ids."""
    digests: list[bytes] = []
    extend(digests, tokens, block_size, extras)
    return digests


def extend(digests: list[bytes], tokens: Sequence[int], block_size: int, extras: bytes) -> None:
    """Append to `digests`, which name the leading blocks of `tokens`, those of the blocks that are full by now."""
    first, last = len(digests), len(tokens) // block_size
    if first >= last:
        return
    if digests:
        parent = digests[-1]
    else:
        parent = blake2b(struct.pack("<I", block_size) + extras, digest_size=DIGEST_BYTES, person=_PERSON).digest()
    packed = pack_tokens(tokens[first * block_size : last * block_size])
    width = 4 * block_size
    for at in range(0, len(packed), width):
        parent = blake2b(parent + packed[at : at + width], digest_size=DIGEST_BYTES, person=_PERSON).digest()
        digests.append(parent)


def max_cached_tokens(num_tokens: int, block_size: int) -> int:
    """The most tokens of a prompt that may come from the cache: at least one is computed, to sample from."""
    return block_size * max(0, (num_tokens - 1) // block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheChanges:
    """The net change of a cache since the last report; a digest is in at most one of the two."""

    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]


class CacheIndex:
    """digest <-> block, with the token ids of every cached block."""

    def __init__(self, block_size: int) -> None:
        self._width = 4 * block_size
        self._block_size = block_size
        self._block_of: dict[bytes, int] = {}
        self._entry_of: dict[int, tuple[bytes, bytes]] = {}  # block -> (digest, packed tokens)
        self._changes: dict[bytes, bool] = {}  # digest -> is stored; the last change wins

    def __contains__(self, block: int) -> bool:
        return block in self._entry_of

    def __len__(self) -> int:
        return len(self._entry_of)

    def find(self, digest: bytes) -> int | None:
        return self._block_of.get(digest)

    def match(self, digests: Sequence[bytes], tokens: Sequence[int]) -> list[int]:
        """The blocks of the longest cached prefix; `digests` name the leading blocks of `tokens`."""
        blocks: list[int] = []
        if not digests or digests[0] not in self._block_of:
            return blocks
        packed, width = pack_tokens(tokens[: len(digests) * self._block_size]), self._width
        for at, digest in enumerate(digests):
            block = self._block_of.get(digest)
            if block is None or self._entry_of[block][1] != packed[at * width : (at + 1) * width]:
                break
            blocks.append(block)
        return blocks

    def estimate(self, digests: Sequence[bytes]) -> int:
        """About how many leading blocks are cached, in O(log n): for ordering only. Tails are evicted first."""
        low, high = 0, len(digests)
        while low < high:
            middle = (low + high) // 2
            if digests[middle] in self._block_of:
                low = middle + 1
            else:
                high = middle
        return low

    def store(self, block: int, digest: bytes, tokens: Sequence[int]) -> None:
        assert block not in self._entry_of and digest not in self._block_of, (block, digest.hex())
        packed = pack_tokens(tokens)
        assert len(packed) == self._width, (block, len(tokens))
        self._block_of[digest] = block
        self._entry_of[block] = (digest, packed)
        self._changes[digest] = True

    def remove(self, block: int) -> None:
        digest, _ = self._entry_of.pop(block)
        del self._block_of[digest]
        self._changes[digest] = False

    def take_events(self) -> CacheChanges:
        """What changed since the last call. Bounded: one entry per digest, however often it came and went."""
        changes, self._changes = self._changes, {}
        return CacheChanges(
            stored=tuple(digest for digest, stored in changes.items() if stored),
            removed=tuple(digest for digest, stored in changes.items() if not stored),
        )

    def snapshot(self) -> CacheChanges:
        """Every cached digest as stored, and no change pending: what a receiver that missed events needs."""
        self._changes.clear()
        return CacheChanges(stored=tuple(self._block_of), removed=())

    def check(self) -> None:
        assert len(self._block_of) == len(self._entry_of), (len(self._block_of), len(self._entry_of))
        for block, (digest, _) in self._entry_of.items():
            assert self._block_of.get(digest) == block, (block, digest.hex())
