"""Which requests are sent, and when: made before the run, from a seed.

Owns arrival times and prompts; sends nothing. Invariant: the same seed gives the same requests, and no two prompts of a
run, warm-up included, share more than chance would have them share, so no prefix cache is measured by accident.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from bench.options import LoadOptions

TOKEN_IDS = (256, 30_000)  # ordinary tokens in every vocabulary of this kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One request: `offset_s` after the start, None in a closed loop; the body is ready to send."""

    offset_s: float | None
    body: bytes
    num_prompt: int
    num_output: int


def offsets(kind: str, rate_rps: float, count: int, rng: random.Random) -> list[float | None]:
    """When each request is due. Poisson arrivals have exponential gaps, fixed ones equal gaps; both start at 0."""
    due_s, result = 0.0, list[float | None]()
    for _ in range(count):
        result.append(None if kind == "closed" else due_s)
        due_s += rng.expovariate(rate_rps) if kind == "poisson" else 1 / rate_rps
    return result


def plan(options: LoadOptions, model: str) -> tuple[list[Planned], list[Planned]]:
    """Warm-up requests and measured requests."""
    rng = random.Random(options.bench.seed)
    due = offsets(options.arrivals, options.rate_rps, options.num_requests, rng)
    warmup = [_request(options, model, None, rng) for _ in range(options.num_warmup)]
    return warmup, [_request(options, model, offset_s, rng) for offset_s in due]


def _request(options: LoadOptions, model: str, offset_s: float | None, rng: random.Random) -> Planned:
    num_prompt, num_output = options.prompt_tokens.draw(rng), options.output_tokens.draw(rng)
    body = {
        "model": model,
        "prompt": [rng.randrange(*TOKEN_IDS) for _ in range(num_prompt)],
        "max_tokens": num_output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return Planned(offset_s=offset_s, body=json.dumps(body).encode(), num_prompt=num_prompt, num_output=num_output)
