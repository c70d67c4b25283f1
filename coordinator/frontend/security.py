"""Who may talk to this server: API keys, deny by default.

Owns the one gate in front of every route. Invariant: with keys configured, nothing but the exact path /health is
answered without one; the comparison takes the same time whatever was sent, and no key is ever logged.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from coordinator.frontend.http import App, Receive, Scope, Send, header, send_error
from pdserve.errors import RequestError

OPEN_PATHS = ("/health",)


class KeyGate:
    def __init__(self, app: App, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or not self._digests or scope["path"] in OPEN_PATHS
        if is_open or self._is_known(header(scope, b"authorization")):
            await self._app(scope, receive, send)
            return
        message = "A valid API key is needed: send Authorization: Bearer KEY"
        await send_error(send, RequestError(message, code="invalid_api_key", status=401))

    def _is_known(self, value: bytes | None) -> bool:
        scheme, _, key = (value or b"").partition(b" ")
        key = key.strip()
        if scheme.lower() != b"bearer" or not key:
            return False
        sent = _digest(key)
        # no early way out: every key is compared
        return sum(hmac.compare_digest(sent, digest) for digest in self._digests) > 0


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
