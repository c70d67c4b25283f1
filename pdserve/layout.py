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
    weights: str = "full"  # what computed the KV: the checkpoint's weights, or "int8"

    @property
    def token_bytes(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_size

    def shape(self, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        return (num_blocks, self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    def difference(self, other: KVLayout) -> str | None:
        """The first field in which two pools' blocks differ, with both values; None when they look alike."""
        for name in ("model", "dtype", "num_layers", "num_kv_heads", "head_dim", "block_size"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} differs: {mine!r} here, {theirs!r} there"
        return None

    def why_unreadable(self, owner: KVLayout) -> str | None:
        """Why a pool of this layout must not read the owner's blocks. Coarser KV never enters a finer cache."""
        if owner.weights not in ("full", self.weights):
            return f"its KV was computed by {owner.weights} weights, this pool's by {self.weights} ones"
        return self.difference(owner)

    def fingerprint(self) -> str:
        fields = (
            LAYOUT_VERSION,
            self.model,
            self.dtype,
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            self.block_size,
            self.weights,
        )
        return hashlib.blake2b(repr(fields).encode(), digest_size=16).hexdigest()

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
