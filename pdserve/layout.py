"""The shape of a KV pool and its fingerprint; numbers only, no tensor.

Two pools may exchange blocks exactly when their fingerprints are equal. Layout version 1:
kv[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], one block contiguous over all layers.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

LAYOUT_VERSION = 1
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    model: str  # fingerprint of the weights, weight precision included
    dtype: str  # bfloat16, float16 or float32
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens

    @property
    def token_bytes(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_size

    def shape(self, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        return (num_blocks, self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    def difference(self, other: KVLayout) -> str | None:
        """The first field in which two layouts differ, with both values; None when blocks may be exchanged."""
        for name in ("model", "dtype", "num_layers", "num_kv_heads", "head_dim", "block_size"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} differs: {mine!r} here, {theirs!r} there"
        return None

    def fingerprint(self) -> str:
        fields = (
            LAYOUT_VERSION,
            self.model,
            self.dtype,
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            self.block_size,
        )
        return hashlib.blake2b(repr(fields).encode(), digest_size=16).hexdigest()

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
