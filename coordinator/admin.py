"""The operators' HTTP listener: pools, their size, and where every request is.

Owns routes and the key; the supervisor does what they ask, through `Operator`. Its own loopback port and its own random
key, so that a client's key never reaches it. Invariant: without the key every route answers 401, unknown ones too.
"""

from __future__ import annotations

import hmac
import json
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from pdserve.config import ROLES
from pdserve.errors import ConfigError, RequestError


class Operator(Protocol):
    async def pools(self) -> dict[str, Any]:
        """Desired and actual size of each pool, and its workers."""

    async def requests(self) -> list[Any]:
        """Every live request, with its stamps."""

    async def scale(self, role: str, replicas: int) -> dict[str, Any]:
        """Start or drain workers until `replicas` are left; returns the pools at once. Raises `ConfigError`."""


class KeyGuard:
    """Pure ASGI: lets nothing pass without `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(b"authorization", b"")
            scheme, _, key = given.partition(b" ")
            if not hmac.compare_digest(scheme.lower() + b" " + key.strip(), self._expected):
                await error_response(401, "the admin key is missing or wrong", "unauthorized")(scope, receive, send)
                return
        await self._app(scope, receive, send)


def error_response(status: int, message: str, code: str, param: str | None = None) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": code}}, status_code=status)


def replicas_of(body: bytes) -> int:
    """The wanted size in `{"replicas": n}`; raises `RequestError`."""
    try:
        given = json.loads(body)
    except ValueError:
        raise RequestError('the body is not JSON; send {"replicas": 2}') from None
    replicas = given.get("replicas") if isinstance(given, dict) else None
    if type(replicas) is not int or not 0 <= replicas <= 256:
        raise RequestError("replicas must be a whole number from 0 to 256", param="replicas")
    return replicas


def create_app(operator: Operator, key: str) -> ASGIApp:
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    @app.get("/admin/pools")
    async def pools() -> JSONResponse:
        return JSONResponse(await operator.pools())

    @app.get("/admin/requests")
    async def requests() -> JSONResponse:
        return JSONResponse({"requests": await operator.requests()})

    @app.put("/admin/pools/{role}")
    async def scale(role: str, request: Request) -> JSONResponse:
        if role not in ROLES:
            raise RequestError(f"there is no pool {role!r}; the pools are {', '.join(ROLES)}", status=404)
        return JSONResponse(await operator.scale(role, replicas_of(await request.body())))

    @app.exception_handler(RequestError)
    async def bad_request(_: Request, error: RequestError) -> JSONResponse:
        return error_response(error.status, error.message, error.code or "invalid_request", error.param)

    @app.exception_handler(ConfigError)
    async def impossible(_: Request, error: ConfigError) -> JSONResponse:
        return error_response(409, str(error), "conflict")

    @app.exception_handler(HTTPException)
    async def unrouted(_: Request, error: HTTPException) -> JSONResponse:
        return error_response(error.status_code, str(error.detail), "not_found")

    return KeyGuard(app, key)
