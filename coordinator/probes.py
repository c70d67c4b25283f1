"""Readiness questions on their way through the engine loops.

Owns which workers still owe an answer to which probe; sends nothing. Invariant: every probe gets one reply, at the
latest after `DEADLINE_S`, and a positive one only if every loop it went through has answered.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any

from pdserve.messages import Ping, ProbeReply

DEADLINE_S = 1.5

Reply = tuple[str, ProbeReply]


@dataclass(slots=True)
class _Probe:
    asker: str
    nonce: int
    owed: set[str]
    detail: dict[str, Any]
    due_s: float


class Probes:
    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[int, _Probe] = {}
        self._pings: list[tuple[str, Ping]] = []

    def begin(
        self, asker: str, nonce: int, workers: list[str], readiness: tuple[bool, dict[str, Any]], now_s: float
    ) -> Reply | None:
        """A reply at once if nothing has to be asked; else `pings()` has what to send."""
        is_ready, detail = readiness
        if not is_ready or not workers:
            return _reply(asker, nonce, is_ready, detail)
        number = next(self._numbers)
        self._open[number] = _Probe(asker, nonce, set(workers), detail, now_s + DEADLINE_S)
        self._pings = [(worker, Ping(nonce=number)) for worker in workers]
        return None

    def pings(self) -> list[tuple[str, Ping]]:
        pings, self._pings = self._pings, []
        return pings

    def pong(self, worker: str, number: int) -> Reply | None:
        probe = self._open.get(number)
        if probe is None:
            return None
        probe.owed.discard(worker)
        if probe.owed:
            return None
        del self._open[number]
        return _reply(probe.asker, probe.nonce, True, probe.detail)

    def overdue(self, now_s: float) -> list[Reply]:
        late = [number for number, probe in self._open.items() if now_s >= probe.due_s]
        replies = []
        for number in late:
            probe = self._open.pop(number)
            detail = {**probe.detail, "ready": False, "reason": "an engine loop does not answer"}
            replies.append(_reply(probe.asker, probe.nonce, False, detail))
        return replies


def _reply(asker: str, nonce: int, is_ready: bool, detail: dict[str, Any]) -> Reply:
    return asker, ProbeReply(nonce=nonce, is_ready=is_ready, detail=json.dumps(detail))
