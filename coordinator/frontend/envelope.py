"""Every answer that is not a result: one JSON envelope, one table from errors to statuses.

Owns the shape {"error": {message, type, param, code}} and Retry-After; writes to no socket. Invariant: no class name,
path or traceback reaches a client.
"""

from __future__ import annotations

import json
import math
from typing import Any

from pdserve.errors import OverloadedError, PDServeError, RequestError

Headers = list[tuple[bytes, bytes]]


class ServiceError(PDServeError):
    """The request was good but cannot be served, or not to its end."""

    def __init__(self, message: str, *, status: int, code: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


class ClientLeftError(Exception):
    """Nobody is there any more to answer."""


def internal_error() -> ServiceError:
    return ServiceError("The server failed on this request; its log says why", status=500, code="internal_error")


def status_of(error: PDServeError) -> int:
    if isinstance(error, (RequestError, OverloadedError, ServiceError)):
        return error.status
    return 500


def body_of(error: PDServeError) -> dict[str, Any]:
    if not isinstance(error, (RequestError, OverloadedError, ServiceError)):
        error = internal_error()
    param = error.param if isinstance(error, RequestError) else None
    code = "overloaded" if isinstance(error, OverloadedError) else error.code
    return {"error": {"message": error.message, "type": _type(error.status), "param": param, "code": code}}


def headers_of(error: PDServeError) -> Headers:
    headers: Headers = []
    status = status_of(error)
    if status in (429, 503):
        retry_after_s = getattr(error, "retry_after_s", 0.0)
        headers.append((b"retry-after", str(max(1, math.ceil(retry_after_s))).encode()))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def encode(body: Any) -> bytes:
    """Strict JSON: a number that is not finite is a bug here, never on the wire."""
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _type(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"
