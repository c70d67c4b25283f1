"""Float32 values as integers that sort alike, for searches without a sort.

Owns the encoding; launches nothing. Invariant: a < b as floats exactly if key(a) < key(b); both zeros have one key, and
every NaN the largest.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

EMPTY = tl.constexpr(-(2**63))  # below every packed pair


@triton.jit
def key_of(x):
    """int32 of float32."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x == x, bits, 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """float32 of int32: what `key_of` was given."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def packed(x, ids):
    """int64 of a value and its id below 2^31: the larger value is larger, among equal values the lower id."""
    return (key_of(x).to(tl.int64) << 32) + (0x7FFFFFFF - ids).to(tl.int64)
