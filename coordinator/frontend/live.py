"""What the core says about the prompts of one HTTP request, in order, until the last of them has ended.

Owns the bounded buffer between the core and a client that may be slower; knows no socket. Invariant: after an
interruption nothing but its error comes out, and the buffer never holds more than its bound.
"""

from __future__ import annotations

import asyncio

from coordinator.frontend.envelope import ServiceError
from pdserve.messages import Ended, Output, SampleEnded

Event = Output | SampleEnded | Ended
_TOKEN_BYTES, _ALTERNATIVE_BYTES = 16, 64  # about what they cost on the wire


class ClientTooSlowError(ServiceError):
    def __init__(self) -> None:
        super().__init__("The client reads too slowly", status=408, code="client_too_slow")


class Live:
    def __init__(self, *, max_buffer_bytes: int) -> None:
        self._max_buffer_bytes: int | None = max_buffer_bytes
        self._num_bytes = 0
        self._events: list[tuple[int, Event]] = []
        self._prompts: dict[int, int] = {}  # ticket -> place of its prompt in the HTTP request
        self._num_open = 0
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def expect(self, ticket: int, prompt: int) -> None:
        self._prompts[ticket] = prompt
        self._num_open += 1

    def keep_everything(self) -> None:
        """For an answer in one piece: no client reads yet, so none is slow; its own size limits bound it."""
        self._max_buffer_bytes = None

    def put(self, event: Event) -> None:
        if self._error is not None:
            return
        if isinstance(event, Output):
            self._num_bytes += sum(_TOKEN_BYTES + _ALTERNATIVE_BYTES * len(token.top) for token in event.tokens)
            if self._max_buffer_bytes is not None and self._num_bytes > self._max_buffer_bytes:
                self.interrupt(ClientTooSlowError())
                return
        self._events.append((self._prompts[event.ticket], event))
        self._wake()

    def interrupt(self, error: Exception) -> None:
        """Whoever takes next gets `error`; the first interruption stands."""
        if self._error is None:
            self._error = error
            self._events.clear()
            self._wake()

    async def take(self, timeout_s: float) -> list[tuple[int, Event]]:
        """Everything that has come as (prompt, event), at least one; empty after `timeout_s` of silence."""
        if not self._events and self._error is None:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(timeout_s, self._wake)
            try:
                await self._waiter
            finally:
                self._waiter = None
                timer.cancel()
        if self._error is not None:
            raise self._error
        events, self._events = self._events, []
        self._num_bytes = 0
        self._num_open -= sum(isinstance(event, Ended) for _, event in events)
        return events

    @property
    def is_over(self) -> bool:
        """Every prompt has ended, and that was taken."""
        return self._num_open == 0

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
