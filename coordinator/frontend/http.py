"""The few things every route does with a connection: read a bounded body, answer in JSON, notice a client leaving.

Owns raw ASGI messages so that routes do not see them. Invariant: at most `max_bytes` of a body are ever held, and
whoever waits for the core also hears when the client is gone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from coordinator.frontend.envelope import ClientLeftError, Headers, body_of, encode, headers_of, status_of
from pdserve.errors import PDServeError, RequestError

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_BIG_BODY_BYTES = 256 * 1024
_MAX_NODES, _MAX_ITEMS = 100_000, 1_000_000  # of a big body: parsing more would hold up everything else


def header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


async def read_json(scope: Scope, receive: Receive, *, max_bytes: int, timeout_s: float) -> dict[str, Any]:
    """The body as an object. Raises RequestError (400, 408, 413) or ClientLeftError."""
    kind = (header(scope, b"content-type") or b"").split(b";")[0].strip().lower()
    if kind != b"application/json" and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
        raise RequestError("The body must be sent as Content-Type: application/json", code="invalid_content_type")
    try:
        async with asyncio.timeout(timeout_s):
            raw = await _read(scope, receive, max_bytes)
    except TimeoutError:
        raise RequestError("The body did not arrive in time", code="body_timeout", status=408) from None
    return parse_object(raw)


def parse_object(raw: bytes) -> dict[str, Any]:
    """Strict JSON (no NaN, no Infinity) with an object on top."""
    if len(raw) > _BIG_BODY_BYTES and _has_too_many_parts(raw):
        raise RequestError("The body has too many parts", code="body_too_complex")
    try:
        body = json.loads(raw.decode(), parse_constant=_refuse_constant)
    except RecursionError:
        raise RequestError("The body is nested too deeply", code="invalid_json") from None
    except UnicodeDecodeError:
        raise RequestError("The body is not UTF-8", code="invalid_json") from None
    except ValueError as error:
        raise RequestError(f"The body is not valid JSON: {str(error)[:100]}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestError("The body must be a JSON object", code="invalid_json")
    return body


async def send_json(send: Send, status: int, body: Any, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    await send_bytes(send, status, encode(body), [(b"content-type", b"application/json"), *headers])


async def send_bytes(send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
    start = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: PDServeError, headers: Headers | None = None) -> None:
    await send_json(send, status_of(error), body_of(error), [*headers_of(error), *(headers or [])])


class Presence:
    """Whether the client is still there, watched from the moment its body has been read."""

    def __init__(self, receive: Receive) -> None:
        self._task = asyncio.get_running_loop().create_task(_until_gone(receive))

    async def __aenter__(self) -> Presence:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    def check(self) -> None:
        """Raises ClientLeftError when nobody is there."""
        if self._task.done():
            raise ClientLeftError("the client left")

    def on_leave(self, callback: Callable[[Exception], None]) -> None:
        self._task.add_done_callback(lambda task: None if task.cancelled() else callback(_left()))


def _left() -> ClientLeftError:
    return ClientLeftError("the client left")


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > max_bytes:
        raise _too_big(max_bytes)
    chunks: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _left()
        chunk = message.get("body", b"")
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise _too_big(max_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _has_too_many_parts(raw: bytes) -> bool:
    """Counts characters, also those inside strings: text of a context's length has far fewer."""
    num_nodes = max(raw.count(b"[") + raw.count(b"{"), raw.count(b":"))
    return num_nodes > _MAX_NODES or raw.count(b",") > _MAX_ITEMS


def _too_big(max_bytes: int) -> RequestError:
    message = f"The body is larger than {max_bytes} bytes, the most that is read"
    return RequestError(message, code="body_too_large", status=413)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")
