"""From what each request was answered to the numbers of a report.

Owns the definitions: TTFT and end-to-end count from when the request was due, TPOT is (last - first) / (tokens - 1),
goodput counts over all offered requests. Invariant: a request that was refused, failed or cut short is shown and misses
every target; none is left out silently.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.report import Check, Row, at_least, at_most
from bench.stream_client import Exchange

PERCENTILES = (50.0, 90.0, 99.0)
LARGEST_LAG_MS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One offered request: `due_s` is when it should have been sent; without an exchange it was not sent."""

    due_s: float
    num_output: int  # tokens asked for
    exchange: Exchange | None

    @property
    def outcome(self) -> str:
        if self.exchange is None:
            return "unsent"
        is_short = self.exchange.num_output is not None and self.exchange.num_output < self.num_output
        return "truncated" if self.exchange.outcome == "ok" and is_short else self.exchange.outcome

    @property
    def latencies_ms(self) -> dict[str, float]:
        """ttft, tpot and e2e of a request that ended well; empty otherwise."""
        exchange = self.exchange
        if exchange is None or self.outcome != "ok" or not exchange.texts_s:
            return {}
        first_s, last_s = exchange.texts_s[0], exchange.texts_s[-1]
        num_output = exchange.num_output or len(exchange.texts_s)
        found = {"ttft": (first_s - self.due_s) * 1e3, "e2e": (exchange.ended_s - self.due_s) * 1e3}
        if num_output > 1:
            found["tpot"] = (last_s - first_s) / (num_output - 1) * 1e3
        return found

    def meets(self, targets_ms: Mapping[str, float]) -> bool:
        """Whether it ended well within every target; one token has no TPOT to miss."""
        found = self.latencies_ms
        return bool(found) and all(found.get(name, 0.0) <= bound for name, bound in targets_ms.items())


def percentile(ordered: Sequence[float], share: float) -> tuple[float, float, float]:
    """The value at `share` percent of a sorted list, and the 95 % interval of its rank (normal approximation)."""
    count, quantile = len(ordered), share / 100
    spread = 1.96 * math.sqrt(count * quantile * (1 - quantile))

    def at(rank: float) -> float:
        return ordered[min(count - 1, max(0, math.ceil(rank) - 1))]

    return at(count * quantile), at(count * quantile - spread), at(count * quantile + spread)


def distribution(name: str, values_ms: Sequence[float]) -> list[Row]:
    """Mean and percentiles; `low` and `high` bound the percentile, `n` is how many values there are."""
    if not values_ms:
        return []
    ordered, count = sorted(values_ms), len(values_ms)
    rows = [Row(name=name, value=sum(ordered) / count, unit="ms", parameters={"statistic": "mean", "n": count})]
    for share in PERCENTILES:
        value, low, high = percentile(ordered, share)
        about = {"statistic": f"p{share:g}", "n": count, "low": low, "high": high}
        rows.append(Row(name=name, value=value, unit="ms", parameters=about))
    return rows


def in_flight(samples: Sequence[Sample]) -> tuple[int, float]:
    """Most requests in flight at once, and their mean over the run, counted from when they were due."""
    spans = [(s.due_s, s.exchange.ended_s) for s in samples if s.exchange is not None]
    if not spans:
        return 0, 0.0
    steps = sorted([(start_s, 1) for start_s, _ in spans] + [(end_s, -1) for _, end_s in spans])
    level = most = 0
    for _, step in steps:
        level += step
        most = max(most, level)
    length_s = max(end_s for _, end_s in spans) - min(start_s for start_s, _ in spans)
    return most, sum(end_s - start_s for start_s, end_s in spans) / length_s if length_s > 0 else 0.0


def summarize(samples: Sequence[Sample], targets_ms: Mapping[str, float]) -> tuple[list[Row], list[Check]]:
    sent = [s.exchange for s in samples if s.exchange is not None]
    outcomes = Counter(s.outcome for s in samples)
    well = [s for s in samples if s.outcome == "ok"]
    latencies = [s.latencies_ms for s in well]
    lags_ms = [(s.exchange.sent_s - s.due_s) * 1e3 for s in samples if s.exchange is not None]
    gaps_ms = [
        (later_s - earlier_s) * 1e3
        for s in well
        if s.exchange is not None
        for earlier_s, later_s in zip(s.exchange.texts_s, s.exchange.texts_s[1:], strict=False)
    ]
    length_s = max((e.ended_s for e in sent), default=0.0) - min((s.due_s for s in samples), default=0.0)
    rows = [Row(name="offered", value=len(samples), unit="requests")]
    for outcome in ("ok", "refused", "failed", "truncated", "unsent"):
        rows.append(Row(name=outcome, value=outcomes[outcome], unit="requests"))
    for name in ("ttft", "tpot", "e2e"):
        rows += distribution(name, [found[name] for found in latencies if name in found])
    rows += distribution("itl", gaps_ms)
    rows += distribution("dispatch_lag", lags_ms)
    rows += _rates(samples, sent, length_s)
    if targets_ms:
        num_good = sum(s.meets(targets_ms) for s in samples)
        about = {f"{name}_ms": bound for name, bound in targets_ms.items()}
        rows.append(
            Row(name="goodput", value=num_good / length_s if length_s > 0 else 0.0, unit="1/s", parameters=about)
        )
        rows.append(Row(name="goodput_share", value=num_good / len(samples), unit="of offered", parameters=about))
    lag_ms = percentile(sorted(lags_ms), 99.0)[0] if lags_ms else math.inf
    checks = [
        at_least("requests that ended well", len(well), 1, ""),
        at_most("p99 dispatch lag of the client", lag_ms, LARGEST_LAG_MS, "ms"),
        at_most("requests the client could not send in time", outcomes["unsent"], 0, ""),
    ]
    return rows, checks


def _rates(samples: Sequence[Sample], sent: Sequence[Exchange], length_s: float) -> list[Row]:
    if not sent or length_s <= 0:
        return []
    most, mean = in_flight(samples)
    num_prompt = sum(e.num_prompt or 0 for e in sent)
    num_output = sum(e.num_output if e.num_output is not None else len(e.texts_s) for e in sent)
    cached = sum(e.num_cached for e in sent)
    return [
        Row(name="duration", value=length_s, unit="s"),
        Row(name="request_rate", value=len(sent) / length_s, unit="1/s"),
        Row(name="output_token_rate", value=num_output / length_s, unit="tokens/s"),
        Row(name="cache_hit_rate", value=cached / num_prompt if num_prompt else 0.0, unit="of prompt tokens"),
        Row(name="max_in_flight", value=most, unit="requests"),
        Row(name="mean_in_flight", value=mean, unit="requests"),
    ]
