"""A front end's process: from what the supervisor says to an HTTP server that talks to the core."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any

from coordinator.corelink import AsyncCoreLink
from coordinator.frontend import server
from pdserve.config import FrontConfig
from pdserve.messages import FrontHello
from pdserve.options import from_plain


def main(plain: Mapping[str, Any]) -> int:
    config = from_plain(FrontConfig, plain)

    def connect(on_message: Callable[[Any], None], on_lost: Callable[[], None]) -> AsyncCoreLink:
        hello = FrontHello(name=config.name)
        return AsyncCoreLink(config.core_endpoint, hello=hello, on_message=on_message, on_lost=on_lost)

    return server.run(config, connect, socket.socket(fileno=config.listen_fd))
