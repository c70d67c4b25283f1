"""This process's own metrics, and one page made of them and the core's.

Owns the HTTP counters and the loop's lag; computes no request metric, which are the core's. Invariant: labels are
bounded, and each metric family appears once on the page.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
_LAGS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
_COMMENT = re.compile(r"# (?:HELP|TYPE) (\S+)")


class FrontMetrics:
    def __init__(self, process: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        registry = self._registry
        self._process = process
        self._answers = Counter(
            "pdserve_http_requests", "HTTP requests answered", ["route", "status", "process"], registry=registry
        )
        self._seconds = Histogram(
            "pdserve_http_request_seconds", "From the headers to the last byte of the answer", ["route", "process"],
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self._open = Gauge("pdserve_http_open", "HTTP requests being answered", ["process"], registry=registry)
        self._lag = Histogram(
            "pdserve_loop_lag_seconds", "How late the event loop runs what is due", ["process"],
            buckets=_LAGS, registry=registry,
        )  # fmt: skip
        self.left = Counter(
            "pdserve_http_clients_left", "Clients that went away before their answer", ["process"], registry=registry
        ).labels(process)
        self.open_now = self._open.labels(process)

    def answered(self, *, route: str, status: int, seconds: float) -> None:
        """`status` 0: the client was gone before there was an answer."""
        self._answers.labels(route, str(status) if status else "none", self._process).inc()
        self._seconds.labels(route, self._process).observe(seconds)

    async def watch_lag(self, *, every_s: float, now_s: Callable[[], float]) -> None:
        """Runs until cancelled."""
        lag = self._lag.labels(self._process)
        while True:
            due_s = now_s() + every_s
            await asyncio.sleep(every_s)
            lag.observe(max(now_s() - due_s, 0.0))

    def page(self, core: str) -> bytes:
        """The exposition of this process merged into the core's text."""
        return merge(core, generate_latest(self._registry).decode()).encode()


def merge(*texts: str) -> str:
    """Several expositions as one: families of the same name stand together under one heading."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for text in texts:
        for name, line in _lines(text):
            comments, samples = families.setdefault(name, ([], []))
            if not line.startswith("#"):
                samples.append(line)
            elif not any(line.split()[:3] == known.split()[:3] for known in comments):
                comments.append(line)
    return "".join(f"{line}\n" for comments, samples in families.values() for line in (*comments, *samples))


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """Each line with its family: that of the heading above, or its own name."""
    family = ""
    for line in text.splitlines():
        if not line.strip():
            continue
        heading = _COMMENT.match(line)
        if heading:
            family = heading[1]
        elif line.startswith("#"):
            continue
        elif not family or not line.startswith(family):
            family = re.split(r"[{\s]", line, maxsplit=1)[0]
        yield family, line
