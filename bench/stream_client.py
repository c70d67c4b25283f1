"""One streamed completion over a connection of its own, with the arrival time of every piece of text.

Owns the bytes of one request and nothing across requests, so there is no pool whose limit could hide waiting; plain
asyncio streams keep the client's own cost low. Invariant: whatever a server does, `complete` says how it ended.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from pdserve.errors import ConfigError

REFUSED = (429, 503)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    host: str
    port: int
    path: str  # before /v1
    api_key: str | None = None


@dataclass(slots=True, kw_only=True)
class Exchange:
    """What one request was answered; times are of `time.perf_counter`."""

    sent_s: float
    ended_s: float = 0.0
    texts_s: list[float] = field(default_factory=list)  # when each non-empty piece of text arrived
    outcome: str = "truncated"  # ok, truncated, refused, failed
    detail: str = ""
    num_prompt: int | None = None  # of the usage the server reports, as the next two
    num_output: int | None = None
    num_cached: int = 0


def server(base_url: str, api_key: str | None) -> Server:
    """Raises `ConfigError` for anything but plain HTTP."""
    parts = urlsplit(base_url)
    if parts.scheme != "http" or not parts.hostname:
        raise ConfigError(f"--base-url is {base_url!r}; it must look like http://127.0.0.1:8000")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return Server(host=parts.hostname, port=parts.port or 80, path=path, api_key=api_key)


async def complete(target: Server, body: bytes, timeout_s: float) -> Exchange:
    """POST /v1/completions and read the stream to its end."""
    exchange = Exchange(sent_s=time.perf_counter())
    try:
        async with asyncio.timeout(timeout_s):
            await _converse(target, body, exchange)
    except TimeoutError:
        exchange.outcome, exchange.detail = "failed", f"no end after {timeout_s:g} s"
    except (OSError, EOFError, ValueError, LookupError, TypeError) as error:
        exchange.outcome = "truncated" if exchange.texts_s else "failed"
        exchange.detail = f"{type(error).__name__}: {error}"
    exchange.ended_s = time.perf_counter()
    return exchange


async def _converse(target: Server, body: bytes, exchange: Exchange) -> None:
    reader, writer = await asyncio.open_connection(target.host, target.port, limit=2**22)
    try:
        key = f"Authorization: Bearer {target.api_key}\r\n" if target.api_key else ""
        head = (
            f"POST {target.path}/v1/completions HTTP/1.1\r\nHost: {target.host}:{target.port}\r\n{key}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        status, headers = await _head(reader)
        pieces = _pieces(reader, headers)
        if status != 200:
            exchange.outcome = "refused" if status in REFUSED else "failed"
            exchange.detail = (
                f"{status}: {(b''.join([piece async for piece in pieces]))[:200].decode(errors='replace')}"
            )
            return
        await _read_events(pieces, exchange)
    finally:
        writer.close()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    fields = (line.partition(":") for line in lines[1:] if line)
    return int(lines[0].split()[1]), {name.lower(): value.strip() for name, _, value in fields}


async def _pieces(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """The body as it arrives; raises `EOFError` when it ends before its announced end."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while piece := await reader.read(65536):
            yield piece


async def _read_events(pieces: AsyncIterator[bytes], exchange: Exchange) -> None:
    pending = b""
    async for piece in pieces:
        now_s = time.perf_counter()
        *lines, pending = (pending + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and _event(line[5:].strip(), exchange, now_s):
                return


def _event(data: bytes, exchange: Exchange, now_s: float) -> bool:
    """Take one event in; True when the stream is over."""
    if data == b"[DONE]":
        return True
    event: dict[str, Any] = json.loads(data)
    if "error" in event:
        exchange.outcome, exchange.detail = "failed", str(event["error"])[:200]
        return True
    for choice in event.get("choices", ()):
        if choice.get("text"):
            exchange.texts_s.append(now_s)
        if choice.get("finish_reason"):
            exchange.outcome = "ok"
    usage = event.get("usage")
    if usage:
        exchange.num_prompt, exchange.num_output = usage.get("prompt_tokens"), usage.get("completion_tokens")
        exchange.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return False
