"""A server that computes nothing: it answers completions with made-up tokens on a schedule.

Owns just enough HTTP to measure the load client itself and to show what each way of failing looks like in a report.
Invariant: what it will do with the n-th request is fixed before the run.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """How the server treats requests: the n-th as `pattern[n % len(pattern)]` says."""

    first_s: float = 0.0  # before the first token
    gap_s: float = 0.0  # between tokens
    pattern: Sequence[str] = ("ok",)  # ok, busy (503), broken (500), drop (cut after three tokens), error (event)
    num_parallel: int = 1_000_000  # requests served at once, the rest waits


class NullServer:
    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour
        self._slots = asyncio.Semaphore(behaviour.num_parallel)
        self.num_requests = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            fields = dict(line.lower().split(":", 1) for line in head.split("\r\n")[1:] if ":" in line)
            body = json.loads(await reader.readexactly(int(fields.get("content-length", "0"))) or b"{}")
            if head.startswith("GET"):
                self._reply(writer, 200, {"object": "list", "data": [{"id": "null", "object": "model"}]})
            else:
                await self._complete(writer, body)
            await writer.drain()
        except (ConnectionError, EOFError):
            return  # the client left
        finally:
            writer.close()

    async def _complete(self, writer: asyncio.StreamWriter, body: dict[str, object]) -> None:
        kind = self._behaviour.pattern[self.num_requests % len(self._behaviour.pattern)]
        self.num_requests += 1
        if kind in ("busy", "broken"):
            self._reply(writer, 503 if kind == "busy" else 500, {"error": {"message": f"{kind}, as planned"}})
            return
        async with self._slots:
            await self._stream(writer, body, kind)

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, object], kind: str) -> None:
        num_tokens, prompt = body["max_tokens"], body["prompt"]
        assert isinstance(num_tokens, int)
        assert isinstance(prompt, list)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for index in range(num_tokens):
            await asyncio.sleep(self._behaviour.gap_s if index else self._behaviour.first_s)
            if kind == "error" and index == 1:
                self._event(writer, {"error": {"message": "as planned"}})
                break
            if kind == "drop" and index == 3:
                return
            reason = "length" if index == num_tokens - 1 else None
            self._event(writer, {"choices": [{"index": 0, "text": " x", "finish_reason": reason}]})
            await writer.drain()
        details = {"cached_tokens": len(prompt) // 2}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": num_tokens, "prompt_tokens_details": details}
        self._event(writer, {"choices": [], "usage": usage})
        self._chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    def _event(self, writer: asyncio.StreamWriter, event: dict[str, object]) -> None:
        self._chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")

    @staticmethod
    def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    @staticmethod
    def _reply(writer: asyncio.StreamWriter, status: int, body: dict[str, object]) -> None:
        data = json.dumps(body).encode()
        writer.write(
            f"HTTP/1.1 {status} -\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()
            + data
        )


@asynccontextmanager
async def null_server(behaviour: Behaviour) -> AsyncIterator[str]:
    """Serve on a free loopback port; yields the base URL."""
    listener = await asyncio.start_server(NullServer(behaviour).serve, "127.0.0.1", 0)
    async with listener:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
