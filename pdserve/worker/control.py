"""One epoch's conversation between a worker and the core.

Owns the link and what the current turn has to report; decides nothing. Tokens and stamps of one turn travel together.
Invariant: nothing reported is dropped; when the core cannot take more, `has_room` is False and the node pauses.
"""

from __future__ import annotations

import time
from typing import Any

import zmq

from pdserve.channel import Link
from pdserve.messages import Key, Stamp, StepReport, TokenOut


class Control:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, epoch: str) -> None:
        self.endpoint = endpoint
        self._link = Link(context, endpoint, epoch)
        self._tokens: list[TokenOut] = []
        self._stamps: list[Stamp] = []
        self._waiting: list[Any] = []  # what the window did not take yet, in order

    @property
    def socket(self) -> zmq.Socket[bytes]:
        return self._link.socket

    @property
    def is_lost(self) -> bool:
        """The core was replaced or has declared this epoch dead."""
        return self._link.is_stale

    @property
    def is_known(self) -> bool:
        """The core has spoken to this epoch."""
        return bool(self._link.remote)

    @property
    def has_room(self) -> bool:
        return not self._waiting

    def receive(self) -> list[Any]:
        return self._link.receive()

    def token(self, token: TokenOut) -> None:
        self._tokens.append(token)

    def stamp(self, key: Key, name: str, value: int = 0, *, time_ns: int | None = None) -> None:
        """Now, unless a time is given (CLOCK_MONOTONIC)."""
        self._stamps.append(Stamp(key=key, name=name, time_ns=time_ns or time.monotonic_ns(), value=value))

    def send(self, message: Any) -> None:
        """In order behind what this turn has reported so far."""
        self._flush_report()
        self._waiting.append(message)
        self._push()

    def flush(self) -> None:
        """Send everything the turn has gathered."""
        self._flush_report()
        self._push()

    def tick(self) -> float | None:
        self._push()
        return self._link.tick()

    def close(self) -> None:
        self._link.close()

    def _flush_report(self) -> None:
        if self._tokens or self._stamps:
            self._waiting.append(StepReport(tokens=tuple(self._tokens), stamps=tuple(self._stamps)))
            self._tokens.clear()
            self._stamps.clear()

    def _push(self) -> None:
        sent = 0
        while sent < len(self._waiting) and self._link.send(self._waiting[sent]):
            sent += 1
        if sent:
            del self._waiting[:sent]
