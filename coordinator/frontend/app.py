"""The front end as one ASGI application: routes, and the layers every request passes.

Owns the order of the layers, all of them plain ASGI, so that a disconnect and every chunk pass through unchanged.
Invariant: whatever fails outside a route still answers in the one envelope, and X-Request-Id comes back as it was.
"""

from __future__ import annotations

import logging
import re
import time
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
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
_ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/health",
    "/ready",
    "/metrics",
)


def build_app(front: Front) -> App:
    inner = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    inner.add_exception_handler(HTTPException, _http_exception)
    routes = Routes(front, started=int(time.time()))
    _add(inner, "POST", "/v1/chat/completions", Generate(front, "chat"))
    _add(inner, "POST", "/v1/completions", Generate(front, "completion"))
    _add(inner, "POST", "/tokenize", Post(front, routes.tokenize))
    _add(inner, "POST", "/detokenize", Post(front, routes.detokenize))
    _add(inner, "GET", "/v1/models", Get(routes.models))
    _add(inner, "GET", "/v1/models/{name:path}", Get(routes.model))
    _add(inner, "GET", "/health", Get(routes.health))
    _add(inner, "GET", "/ready", Get(routes.ready))
    _add(inner, "GET", "/metrics", _Raw(routes.metrics))
    app: App = KeyGate(inner, front.config.api_keys)
    if front.config.cors_origins:
        # never with credentials: the key travels in a header, and cookies mean nothing here
        app = CORSMiddleware(
            app,
            allow_origins=front.config.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("authorization", "content-type", "x-request-id", "x-tenant"),
            expose_headers=("x-request-id", "x-pdserve-mode", "x-pdserve-ignored"),
            allow_credentials=False,
        )
    return Frame(app, front)


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
            log.exception("a request failed")
            if answer.status:
                raise
            await send_error(answer, internal_error())
        finally:
            self._metrics.open_now.dec()
            seconds = time.monotonic() - started_s
            self._metrics.answered(route=_route(scope["path"]), status=answer.status, seconds=seconds)


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


class _Raw:
    """Makes a method an ASGI endpoint that routing does not wrap."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def _add(app: FastAPI, method: str, path: str, endpoint: Any) -> None:
    app.router.add_route(path, endpoint, methods=[method])


async def _http_exception(request: Any, error: Any) -> Any:
    """Routing's own refusals: unknown paths and methods."""
    if error.status_code == 404:
        refusal: RequestError = NotFoundError("There is nothing at this address", code="not_found")
    elif error.status_code == 405:
        refusal = RequestError("This address does not take that method", code="method_not_allowed", status=405)
    else:
        refusal = RequestError(str(error.detail), status=error.status_code)
    headers = [(key.lower().encode(), value.encode()) for key, value in (error.headers or {}).items()]

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send_error(send, refusal, headers)

    return answer


def _route(path: str) -> str:
    """A bounded label."""
    if path.startswith("/v1/models/"):
        return "/v1/models/{id}"
    return path if path in _ROUTES else "other"
