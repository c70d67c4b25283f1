"""Server-sent events: each one `data: {json}` line and a blank line, nothing else but comment pings.

Owns the bytes on the wire of a stream. Invariant: whatever the text holds, an event is one line of ASCII, so no
client can split it elsewhere.
"""

from __future__ import annotations

import json
from typing import Any

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # reverse proxies that would collect events first
]
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))  # ASCII: U+2028 and its like end lines for some


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + _ENCODER.encode(body).encode() + b"\n\n"
