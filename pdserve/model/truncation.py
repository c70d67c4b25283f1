"""Which tokens may be drawn: top-k, top-p and min-p as one threshold per row.

Owns the meaning of ties: whoever equals a threshold survives, so the survivors depend on values, never on order.
Invariant: the likeliest token survives every setting.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pdserve.model.rows import descending
from pdserve.request import Sampling


def threshold(scaled: Tensor, sampling: Sampling) -> Tensor | None:
    """The least value of `scaled` [vocab] that may be drawn; None where nothing is cut.

    `scaled` is the logits over temperature, less their peak, so its largest value is 0. top_k keeps the k-th largest
    value and all above. top_p then keeps, among those, the fewest values in descending order whose probabilities (over
    the survivors of top_k) reach p (Holtzman et al., 2020), and all that equal the last of them. min_p keeps what is at
    least p times as likely as the likeliest (Nguyen et al., 2024).
    """
    limits = []
    if sampling.top_p < 1.0:
        limits.append(_nucleus(descending(scaled), sampling.top_p, sampling.top_k))
    elif 0 < sampling.top_k < scaled.numel():
        limits.append(scaled.topk(sampling.top_k).values[-1])
    if sampling.min_p > 0.0:
        limits.append(scaled.new_tensor(min(math.log(sampling.min_p), 0.0)))
    return torch.stack(limits).amax() if limits else None


def _nucleus(ordered: Tensor, top_p: float, top_k: int) -> Tensor:
    """The value of `ordered` (descending) at which the cumulative probability reaches `top_p`; sums in float64."""
    if 0 < top_k < ordered.numel():
        ordered = ordered[ordered >= ordered[top_k - 1]]
    mass = ordered.exp().cumsum(0, dtype=torch.float64)
    enough = int(torch.searchsorted(mass, top_p * mass[-1]))
    return ordered[min(enough, ordered.numel() - 1)]
