"""Int8 weights: one symmetric scale per output channel, activations as they are.

Owns what is rounded how, and the product in plain torch; the native kernels read the same integers. Invariant: every
kernel set quantizes with `quantize`, so that sets differ only by the rounding of sums.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

LARGEST = 127  # -128 is never used, so that a weight and its negative are equally exact


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`weight` [out_features, in_features] -> integers int8 of its shape, scales float32 [out_features].

    scale = largest magnitude / 127, integers round to nearest even (W8 weight-only, as in LLM.int8(), Dettmers et al.,
    2022, without its outliers). A channel of zeros gets scale 0.
    """
    wide = weight.float()
    scale = wide.abs().amax(dim=1) / LARGEST
    divisor = scale.where(scale > 0, 1.0)
    return (wide / divisor[:, None]).round().clamp(-LARGEST, LARGEST).to(torch.int8), scale


def quantized_bytes(out_features: int, in_features: int) -> int:
    """Bytes of one quantized weight with its scales, bias and padding not counted."""
    return out_features * (in_features + 4)


class Int8Linear:
    """x [rows, in_features] times the integers in float32, then the scales: plain torch, any shape and device."""

    def __init__(self, weight: Tensor, bias: Tensor | None, float32_out: bool) -> None:
        self._integers, self._scale = quantize(weight)
        self._bias = None if bias is None else bias.float()
        self._float32_out = float32_out

    def __call__(self, x: Tensor) -> Tensor:
        y = functional.linear(x.float(), self._integers.float()) * self._scale
        if self._bias is not None:
            y += self._bias
        return y if self._float32_out else y.to(x.dtype)
