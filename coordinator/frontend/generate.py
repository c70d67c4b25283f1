"""POST /v1/chat/completions and /v1/completions, streamed and whole.

Owns the order of things in one request, from its body to its last byte. Invariant: an error before the first byte is
an HTTP error, one after it is an error event and [DONE]; a client that leaves has its request abandoned at the core.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time

from coordinator.frontend import sse
from coordinator.frontend.choice import Choice
from coordinator.frontend.envelope import ClientLeftError, Headers, body_of, internal_error
from coordinator.frontend.front import Front, leaving, tenant_of
from coordinator.frontend.generation import Generation
from coordinator.frontend.http import Presence, Receive, Scope, Send, header, read_json, send_error, send_json
from coordinator.frontend.live import ClientTooSlowError, Live
from coordinator.frontend.shapes import Shape
from coordinator.frontend.validate import Kind, Parsed
from pdserve.errors import PDServeError

log = logging.getLogger("pdserve.front")
_ID_PREFIX = {"chat": "chatcmpl-", "completion": "cmpl-"}
_MAX_IGNORED = 20
_HEADER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Generate:
    """An ASGI endpoint."""

    def __init__(self, front: Front, kind: Kind) -> None:
        self._front = front
        self._kind: Kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        received_ns = time.monotonic_ns()
        config = self._front.config
        try:
            body = await read_json(
                scope, receive, max_bytes=config.http.max_body_bytes, timeout_s=config.http.client_stall_timeout_s
            )
            async with Presence(receive) as presence:
                parsed = self._front.parse(self._kind, body)
                del body
                await self._serve(parsed, _Call(scope, send, presence, received_ns))
        except (ClientLeftError, ClientTooSlowError):
            self._front.metrics.left.inc()
        except PDServeError as error:
            await send_error(send, error)

    async def _serve(self, parsed: Parsed, call: _Call) -> None:
        front = self._front
        prepared = await front.prepare(parsed)
        if front.is_leaving:
            raise leaving()
        tenant = tenant_of(header(call.scope, b"x-tenant"))
        submits = front.submits(parsed, prepared, tenant=tenant, received_ns=call.received_ns)
        table = front.tokenizer.table
        generation = Generation(prepared, stop=parsed.stop, table=table, on_stop=front.client.stop_found)
        name = _ID_PREFIX[self._kind] + secrets.token_hex(12)
        shape = Shape(id=name, created=int(time.time()), parsed=parsed, table=table)
        await front.client.wait_connected(front.config.connect_patience_s)
        call.presence.check()
        async with front.client.open(submits) as live:
            call.presence.on_leave(live.interrupt)
            if parsed.is_stream:
                wire = Wire(call.send, parsed, generation, stall_timeout_s=front.config.http.client_stall_timeout_s)
                await stream(live, generation, shape, wire, ping_interval_s=front.config.ping_interval_s)
                return
            live.keep_everything()
            while not live.is_over:
                generation.apply(await live.take(3600.0))
        pieces = [choice.take() for choice in generation.choices]
        await send_json(call.send, 200, shape.full(generation, pieces), headers_for(parsed, generation.mode))


class _Call:
    """One HTTP request's connection."""

    __slots__ = ("presence", "received_ns", "scope", "send")

    def __init__(self, scope: Scope, send: Send, presence: Presence, received_ns: int) -> None:
        self.scope = scope
        self.send = send
        self.presence = presence
        self.received_ns = received_ns


class Wire:
    """The response of a stream: its headers go out with the first bytes."""

    def __init__(self, send: Send, parsed: Parsed, generation: Generation, *, stall_timeout_s: float) -> None:
        self._send = send
        self._parsed = parsed
        self._generation = generation
        self._stall_timeout_s = stall_timeout_s
        self.is_started = False

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        """Raises ClientTooSlowError when the client does not read."""
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                if not self.is_started:
                    self.is_started = True
                    headers = [*sse.HEADERS, *headers_for(self._parsed, self._generation.mode)]
                    await self._send({"type": "http.response.start", "status": 200, "headers": headers})
                await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})
        except TimeoutError:
            raise ClientTooSlowError from None


async def stream(live: Live, generation: Generation, shape: Shape, wire: Wire, *, ping_interval_s: float) -> None:
    """Write everything to the end; raises only what may still become an HTTP error, or a client that is gone."""
    chunks = Chunks(generation, shape)
    try:
        while not live.is_over:
            events = await live.take(ping_interval_s)
            if not events:
                await wire.write(sse.PING)
                continue
            data = b"".join(map(chunks.news, generation.apply(events)))
            if data:
                await wire.write(data)
        await wire.write(chunks.end(), is_last=True)
    except (ClientLeftError, ClientTooSlowError):
        raise
    except PDServeError as error:
        if not wire.is_started:
            raise
        await _end_in_error(chunks, generation, wire, error)
    except Exception:
        log.exception("a stream failed")
        if not wire.is_started:
            raise internal_error() from None
        await _end_in_error(chunks, generation, wire, internal_error())


async def _end_in_error(chunks: Chunks, generation: Generation, wire: Wire, error: PDServeError) -> None:
    """What was generated before the error, the error, and the end."""
    rest = b"".join(chunks.text(choice) for choice in generation.choices if choice.has_news)
    await wire.write(rest + sse.event(body_of(error)) + sse.DONE, is_last=True)


class Chunks:
    """The events of a stream, in the order OpenAI promises: role, content, one finish per index, usage, [DONE]."""

    def __init__(self, generation: Generation, shape: Shape) -> None:
        self._generation = generation
        self._shape = shape
        self._opened: set[int] = set()
        self._closed: set[int] = set()

    def news(self, choice: Choice) -> bytes:
        if choice.index in self._closed:
            return b""
        data = self.text(choice) if choice.has_news or choice.is_over else self._open(choice)
        if choice.is_over:
            self._closed.add(choice.index)
            data += sse.event(self._shape.last(choice))
        return data

    def text(self, choice: Choice) -> bytes:
        """The choice's new text in one chunk, whatever number of tokens it came from."""
        piece = choice.take()
        data = self._open(choice)
        if piece.text or (piece.tokens and self._shape.wants_tokens()):
            data += sse.event(self._shape.delta(choice, piece))
        return data

    def end(self) -> bytes:
        closing = self._shape.closing(self._generation)
        return (b"" if closing is None else sse.event(closing)) + sse.DONE

    def _open(self, choice: Choice) -> bytes:
        if choice.index in self._opened:
            return b""
        self._opened.add(choice.index)
        first = self._shape.first(choice, self._generation)
        return b"" if first is None else sse.event(first)


def headers_for(parsed: Parsed, mode: str) -> Headers:
    headers: Headers = []
    if mode:
        headers.append((b"x-pdserve-mode", mode.encode()))
    names = [name for name in parsed.ignored if _HEADER_NAME.fullmatch(name)][:_MAX_IGNORED]
    if names:
        headers.append((b"x-pdserve-ignored", ", ".join(names).encode()))
    elif parsed.ignored:
        headers.append((b"x-pdserve-ignored", str(len(parsed.ignored)).encode()))
    return headers
