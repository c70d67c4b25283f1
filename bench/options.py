"""What a load run is asked to do, as values, and the parsing of their short notations.

Owns spans of lengths and goodput targets; sends nothing. Invariant: `load_options` returns only a run that can end.
"""

from __future__ import annotations

import random
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.report import BenchOptions
from pdserve.errors import ConfigError

ARRIVALS = ("poisson", "fixed", "closed")
TARGETS = ("ttft", "tpot", "e2e")
QUICK_REQUESTS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A whole number, or any from `low` to `high`, uniformly."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    bench: BenchOptions
    arrivals: str = "poisson"  # poisson and fixed are open loop, closed keeps `concurrency` in flight
    rate_rps: float = 2.0
    concurrency: int = 8
    num_requests: int = 100
    num_warmup: int = 2
    prompt_tokens: Span = Span(low=128, high=128)
    output_tokens: Span = Span(low=64, high=64)
    targets_ms: Mapping[str, float] = field(default_factory=dict)  # of ttft, tpot, e2e
    timeout_s: float = 120.0
    too_late_s: float = 0.25  # a request the client is later for than this is not sent, but counted
    api_key: str | None = None
    serve_flags: tuple[str, ...] = ()  # for the server the bench starts


def span(text: str, name: str) -> Span:
    """`128` or `64:512`; raises `ConfigError`."""
    low, _, high = text.partition(":")
    if not low.isdecimal() or not (high or low).isdecimal() or not 1 <= int(low) <= int(high or low):
        raise ConfigError(f"{name} is {text!r}; it must be a length such as 128, or two such as 64:512")
    return Span(low=int(low), high=int(high or low))


def targets(text: str) -> dict[str, float]:
    """`ttft:1000 tpot:50` in milliseconds; raises `ConfigError`."""
    found: dict[str, float] = {}
    for part in text.replace(",", " ").split():
        name, _, value = part.partition(":")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = -1.0
        if name not in TARGETS or not found[name] > 0:
            raise ConfigError(
                f"--goodput has {part!r}; it must look like ttft:1000 tpot:50 (also e2e), in milliseconds"
            )
    return found


def load_options(
    *,
    bench: BenchOptions,
    prompt_tokens: str,
    output_tokens: str,
    goodput: str,
    serve_flags: str,
    **rest: Any,
) -> LoadOptions:
    """From the command line's words; raises `ConfigError`."""
    options = LoadOptions(
        bench=bench,
        prompt_tokens=span(prompt_tokens, "--prompt-tokens"),
        output_tokens=span(output_tokens, "--output-tokens"),
        targets_ms=targets(goodput),
        serve_flags=tuple(shlex.split(serve_flags)),
        **(rest | ({"num_requests": min(rest["num_requests"], QUICK_REQUESTS)} if bench.is_quick else {})),
    )
    if options.arrivals not in ARRIVALS:
        raise ConfigError(f"--arrivals is {options.arrivals!r}; it must be one of {', '.join(ARRIVALS)}")
    if not 0 < options.rate_rps <= 100_000:
        raise ConfigError(f"--rate is {options.rate_rps:g}; it must be above 0 and at most 100000")
    for name, value in (("--requests", options.num_requests), ("--concurrency", options.concurrency)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    if options.num_warmup < 0 or not options.timeout_s > 0:
        raise ConfigError("--warmup must be at least 0, and --timeout above 0")
    if bench.base_url is not None and options.serve_flags:
        raise ConfigError("--serve is for a server that the bench starts; drop it, or drop --base-url")
    return options
