"""The front end as one ASGI application: routes, and the layers every request passes.

Owns the table of addresses and the order of the layers, all of them plain ASGI, so that a disconnect and every chunk
pass through unchanged. Invariant: every answer that is not a result has the one envelope, and X-Request-Id comes back
as it was.
"""

from __future__ import annotations

import logging
import re
import time

from starlette.middleware.cors import CORSMiddleware

from coordinator.frontend.envelope import internal_error
from coordinator.frontend.front import Front
from coordinator.frontend.generate import Generate
from coordinator.frontend.http import App, Message, Receive, Scope, Send, header, send_error
from coordinator.frontend.routes import Get, Post, Routes
from coordinator.frontend.security import KeyGate
from pdserve.errors import NotFoundError, RequestError

log = logging.getLogger("pdserve.front")
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_MODEL = "/v1/models/"  # a model's name follows
_PLAIN = frozenset(
    (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/health",
        "/ready",
        "/metrics",
    )
)


def build_app(front: Front) -> App:
    routes = Routes(front, started=int(time.time()))
    app: App = KeyGate(
        Router(
            {
                "/v1/chat/completions": ("POST", Generate(front, "chat")),
                "/v1/completions": ("POST", Generate(front, "completion")),
                "/v1/models": ("GET", Get(routes.models)),
                _MODEL: ("GET", Get(routes.model)),
                "/tokenize": ("POST", Post(front, routes.tokenize)),
                "/detokenize": ("POST", Post(front, routes.detokenize)),
                "/health": ("GET", Get(routes.health)),
                "/ready": ("GET", Get(routes.ready)),
                "/metrics": ("GET", routes.metrics),
            }
        ),
        front.api_keys,
    )
    if origin := front.config.http.cors_origin:
        # never with credentials: the key travels in a header, and cookies mean nothing here
        app = CORSMiddleware(
            app,
            allow_origins=(origin,),
            allow_methods=("GET", "POST"),
            allow_headers=("authorization", "content-type", "x-request-id", "x-tenant"),
            expose_headers=("x-request-id", "x-pdserve-mode", "x-pdserve-ignored"),
            allow_credentials=False,
        )
    return Frame(app, front)


class Router:
    """Exact addresses, one method each (HEAD goes where GET goes); an address that ends in / takes what follows."""

    def __init__(self, table: dict[str, tuple[str, App]]) -> None:
        self._table = table

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no websockets, and nothing to do at start-up
        method, endpoint = self._table.get(route_of(scope["path"]), ("", _nowhere))
        methods = (method, "HEAD") if method == "GET" else (method,)
        if method and scope["method"] not in methods:
            refusal = RequestError("This address does not take that method", code="method_not_allowed", status=405)
            await send_error(send, refusal, [(b"allow", ", ".join(methods).encode())])
            return
        await endpoint(scope, receive, send)


class Frame:
    """The outermost layer: counts, echoes the request's id, and answers for what nobody caught."""

    def __init__(self, app: App, front: Front) -> None:
        self._app = app
        self._metrics = front.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.monotonic()
        answer = _Answer(send, header(scope, b"x-request-id"))
        self._metrics.open_now.inc()
        try:
            await self._app(scope, receive, answer)
        except Exception:
            if answer.status:
                raise  # the server closes the connection: there is no good end to what has begun
            log.exception("a request failed")
            await send_error(answer, internal_error())
        finally:
            self._metrics.open_now.dec()
            seconds = time.monotonic() - started_s
            self._metrics.answered(route=route_of(scope["path"]), status=answer.status, seconds=seconds)


class _Answer:
    """A `send` that notes the status and adds the request's id."""

    def __init__(self, send: Send, request_id: bytes | None) -> None:
        self._send = send
        self._request_id = request_id if request_id and _REQUEST_ID.fullmatch(request_id) else None
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self._request_id is not None:
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", self._request_id)]
        await self._send(message)


def route_of(path: str) -> str:
    """The entry of the table an address belongs to, or `other`: also a bounded label."""
    if path.startswith(_MODEL) and len(path) > len(_MODEL):
        return _MODEL
    return path if path in _PLAIN else "other"


async def _nowhere(scope: Scope, receive: Receive, send: Send) -> None:
    await send_error(send, NotFoundError("There is nothing at this address", code="not_found"))
