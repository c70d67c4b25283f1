"""The front end's side of the conversation with the core: tickets, open requests, probes and queries.

Owns the table from tickets to open requests; moves no bytes (`CoreLink` does) and writes no HTTP. Invariant: an open
request ends by `Ended` or is abandoned, exactly once, whoever goes away first.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol, TypeVar

from coordinator.frontend.envelope import ServiceError
from coordinator.frontend.live import Live
from pdserve.messages import (
    Abandon,
    Ended,
    Output,
    Probe,
    ProbeReply,
    Query,
    QueryReply,
    SampleEnded,
    StopFound,
    Submit,
)

Reply = TypeVar("Reply", ProbeReply, QueryReply)


class CoreLink(Protocol):
    """Exactly-once, in-order delivery within one life of the core. Calls its two callbacks in the event loop."""

    @property
    def is_connected(self) -> bool: ...

    def start(self) -> None:
        """Begin; a loop is running."""
        ...

    def send(self, message: Any) -> bool:
        """False: the queue is full, or the core is being replaced; the message was not taken."""
        ...

    def close(self) -> None: ...


Connect = Callable[[Callable[[Any], None], Callable[[], None]], CoreLink]  # on_message, on_lost -> link


class CoreClient:
    def __init__(self, connect: Connect, *, max_buffer_bytes: int) -> None:
        self._link = connect(self.deliver, self.core_lost)
        self._max_buffer_bytes = max_buffer_bytes
        self._tickets = itertools.count(1)
        self._nonces = itertools.count(1)
        self._open: dict[int, Live] = {}
        self._replies: dict[int, asyncio.Future[Any]] = {}

    @property
    def is_connected(self) -> bool:
        return self._link.is_connected

    @property
    def num_open(self) -> int:
        return len(self._open)

    def start(self) -> None:
        self._link.start()

    def close(self) -> None:
        self._link.close()

    def open(self, submits: Sequence[Submit]) -> Opening:
        """`async with` gives the `Live` of these prompts; their tickets are filled in here."""
        return Opening(self, submits)

    def deliver(self, message: Any) -> None:
        """A message from the core."""
        match message:
            case Output() | SampleEnded() | Ended():
                live = self._open.get(message.ticket)
                if live is None:
                    return  # abandoned meanwhile
                live.put(message)
                if isinstance(message, Ended):
                    del self._open[message.ticket]
            case ProbeReply() | QueryReply():
                reply = self._replies.pop(message.nonce, None)
                if reply is not None and not reply.done():
                    reply.set_result(message)

    def core_lost(self) -> None:
        """The core was replaced: it knows none of the open requests."""
        lost, self._open = self._open, {}
        for live in dict.fromkeys(lost.values()):
            live.interrupt(_lost())
        replies, self._replies = self._replies, {}
        for reply in replies.values():
            if not reply.done():
                reply.set_exception(_lost())

    def interrupt_all(self, error: Exception) -> None:
        """End every open request with `error`; their owners abandon them."""
        for live in dict.fromkeys(self._open.values()):
            live.interrupt(error)

    def stop_found(self, ticket: int, sample: int, num_generated: int) -> None:
        if ticket in self._open:
            self._send_surely(StopFound(ticket=ticket, sample=sample, num_generated=num_generated))

    async def probe(self, timeout_s: float) -> ProbeReply:
        """Raises ServiceError when the core does not answer in time."""
        reply: ProbeReply = await self._ask(Probe(nonce=next(self._nonces)), timeout_s)
        return reply

    async def query(self, what: str, timeout_s: float) -> str:
        reply: QueryReply = await self._ask(Query(nonce=next(self._nonces), what=what), timeout_s)
        return reply.body

    async def _ask(self, question: Probe | Query, timeout_s: float) -> Any:
        if not self.is_connected or not self._link.send(question):
            raise _unreachable()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._replies[question.nonce] = future
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            message = f"The scheduler did not answer within {timeout_s:g} s"
            raise ServiceError(message, status=503, code="not_ready", retry_after_s=1.0) from None
        finally:
            self._replies.pop(question.nonce, None)

    async def wait_connected(self, patience_s: float) -> None:
        """Until the core has answered; at most so long, for what is sent then says why it cannot be."""
        end_s = time.monotonic() + patience_s
        while not self.is_connected and time.monotonic() < end_s:
            await asyncio.sleep(0.02)

    def submit(self, live: Live, submit: Submit) -> None:
        if not self.is_connected or not self._link.send(submit):
            raise _unreachable()
        self._open[submit.ticket] = live

    def abandon(self, ticket: int, reason: str) -> None:
        """Nothing happens to a ticket that has ended."""
        if self._open.pop(ticket, None) is not None:
            self._send_surely(Abandon(ticket=ticket, reason=reason))

    def _send_surely(self, message: Abandon | StopFound) -> None:
        """A queue that is full now has room soon; a core that is gone has forgotten the ticket."""
        if self.is_connected and not self._link.send(message):
            asyncio.get_running_loop().call_later(0.1, self._send_surely, message)

    def next_ticket(self) -> int:
        return next(self._tickets)

    def new_live(self) -> Live:
        return Live(max_buffer_bytes=self._max_buffer_bytes)


class Opening:
    """The span of one HTTP request's prompts at the core."""

    def __init__(self, client: CoreClient, submits: Sequence[Submit]) -> None:
        self._client = client
        self._submits = submits
        self._tickets: list[int] = []

    async def __aenter__(self) -> Live:
        live = self._client.new_live()
        try:
            for prompt, submit in enumerate(self._submits):
                numbered = _with_ticket(submit, self._client.next_ticket())
                self._client.submit(live, numbered)
                self._tickets.append(numbered.ticket)
                live.expect(numbered.ticket, prompt)
        except BaseException:
            self._leave("not all prompts could be sent")
            raise
        return live

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave(str(error) or "the answer was cut short")

    def _leave(self, reason: str) -> None:
        for ticket in self._tickets:
            self._client.abandon(ticket, reason)


class PoolLimit:
    """The most tokens a request can ever have in the pools there are; unknown until the core has said it."""

    def __init__(self, client: CoreClient, *, max_age_s: float, now_s: Callable[[], float]) -> None:
        self._client = client
        self._max_age_s = max_age_s
        self._now_s = now_s
        self._asked_s = float("-inf")
        self._tokens: int | None = None
        self._task: asyncio.Task[None] | None = None

    def within(self, max_model_len: int) -> int:
        """The limit as known now; when that is old, a new answer is on its way."""
        now_s = self._now_s()
        if now_s - self._asked_s >= self._max_age_s and self._client.is_connected:
            self._asked_s = now_s
            self._task = asyncio.get_running_loop().create_task(self.refresh())
        return max_model_len if self._tokens is None else min(max_model_len, self._tokens)

    async def refresh(self) -> None:
        try:
            body = json.loads(await self._client.query("pools", 2.0))
        except (ServiceError, ValueError):
            return  # the last word stands; requests beyond the real limit are refused by the core
        tokens = body.get("max_request_tokens") if isinstance(body, dict) else None
        self._tokens = tokens if type(tokens) is int and tokens > 1 else None


def _with_ticket(submit: Submit, ticket: int) -> Submit:
    return dataclasses.replace(submit, ticket=ticket)


def _lost() -> ServiceError:
    message = "The scheduler was restarted while this request ran; try again"
    return ServiceError(message, status=503, code="scheduler_lost", retry_after_s=1.0)


def _unreachable() -> ServiceError:
    message = "The scheduler cannot be reached now; try again"
    return ServiceError(message, status=503, code="scheduler_unreachable", retry_after_s=1.0)
