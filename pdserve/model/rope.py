"""Rotary tables: cosines and sines per position, in float32.

Owns the frequencies and their scaling; kernels own the rotation. Invariant: row p depends on p and the spec alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pdserve.model.spec import Rope


def rope_table(rope: Rope, head_dim: int, num_positions: int) -> Tensor:
    """Float32 [num_positions, 2, head_dim / 2]: cosines, then sines, of position times frequency."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * frequencies(rope, head_dim)[None, :]
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Float32 [head_dim / 2], radians per token."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    return plain


def _llama3(plain: Tensor, rope: Rope) -> Tensor:
    """Llama 3.1's rule: short waves stay, long ones are slowed by `factor`, those between are interpolated."""
    wavelength = 2 * math.pi / plain
    longest_kept = rope.original_positions / rope.high_freq_factor
    shortest_slowed = rope.original_positions / rope.low_freq_factor
    share_kept = (rope.original_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - share_kept) * plain / rope.factor + share_kept * plain
    return torch.where(
        wavelength < longest_kept, plain, torch.where(wavelength > shortest_slowed, plain / rope.factor, between)
    )
