"""Which tokens may be drawn: top-k, top-p and min-p as one threshold per row.

Owns the meaning of ties: whoever equals a threshold survives, so the survivors depend on values, never on order.
Invariant: the likeliest token survives every setting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.request import Sampling

_FIRST_LOOK = 256  # candidates sorted at first; eight times as many at each further look


def thresholds(scaled: Tensor, samplings: Sequence[Sampling]) -> list[Tensor | None]:
    """Per row of `scaled` [rows, vocab], the least value that may be drawn; None where nothing is cut.

    `scaled` is the logits over temperature, less their peak: the largest of each row is 0.
    top_k keeps the k-th largest value and all above. top_p then keeps, among those, the fewest values in descending
    order whose probabilities (over the survivors of top_k) reach p (Holtzman et al., 2020), and all equal to the last.
    min_p keeps what is at least p times as likely as the likeliest (Nguyen et al., 2024).
    """
    return [_threshold(scaled[index], sampling) for index, sampling in enumerate(samplings)]


def _threshold(row: Tensor, sampling: Sampling) -> Tensor | None:
    limit: Tensor | None = None
    if 0 < sampling.top_k < row.numel():
        limit = row.topk(sampling.top_k).values[-1]
    if sampling.top_p < 1.0:
        limit = _top_p(row, sampling.top_p, limit)
    if sampling.min_p > 0.0:
        least = row.new_tensor(min(math.log(sampling.min_p), 0.0))
        limit = least if limit is None else torch.maximum(limit, least)
    return limit


def _top_p(row: Tensor, top_p: float, limit: Tensor | None) -> Tensor:
    """The value at which the descending cumulative probability reaches `top_p`; sums are taken in float64."""
    weights = row.exp()
    if limit is not None:
        weights = torch.where(row >= limit, weights, 0.0)
    needed = top_p * weights.sum(dtype=torch.float64)
    looked_at = _FIRST_LOOK
    while True:
        best = row.topk(min(looked_at, row.numel())).values
        mass = best.exp().cumsum(0, dtype=torch.float64)
        enough = int((mass < needed).sum())
        if enough < best.numel() or best.numel() == row.numel():
            cut = best[min(enough, best.numel() - 1)]
            return cut if limit is None else torch.maximum(cut, limit)
        looked_at *= 8
