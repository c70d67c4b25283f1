"""The asyncio end of a session with the core, for front ends and the supervisor.

Owns one `Link` at a time and makes a new one, with a new epoch, whenever the core was replaced; knows no request.
Invariant: between two calls of `on_lost` every message belongs to one life of the core.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import zmq

from pdserve.channel import Link, new_epoch


class AsyncCoreLink:
    """`on_message(message)` is called in the loop for each message, `on_lost()` when the core was replaced."""

    def __init__(
        self, endpoint: str, *, hello: Any, on_message: Callable[[Any], None], on_lost: Callable[[], None]
    ) -> None:
        self._endpoint = endpoint
        self._hello = hello
        self._on_message = on_message
        self._on_lost = on_lost
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._link: Link | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._fd = -1

    @property
    def is_connected(self) -> bool:
        """The core has answered in its present life."""
        return self._link is not None and bool(self._link.remote) and not self._link.is_stale

    def start(self) -> None:
        """Connect; call in a running loop."""
        self._link = Link(self._context, self._endpoint, new_epoch())
        self._link.send(self._hello)
        self._fd = self._link.socket.fileno()
        asyncio.get_running_loop().add_reader(self._fd, self._pump)
        self._pump()

    def send(self, message: Any) -> bool:
        """Queue a message; False when the window is full or the core is being replaced."""
        if self._link is None or not self._link.send(message):
            return False
        # ZeroMQ's descriptor is edge-triggered: sending may have consumed the edge of something that arrived
        asyncio.get_running_loop().call_soon(self._pump)
        return True

    def close(self) -> None:
        self._drop()
        self._context.destroy(linger=0)

    def _drop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._link is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            self._link.close()
            self._link = None

    def _pump(self) -> None:
        link = self._link
        if link is None:
            return
        while received := link.receive():
            for message in received:
                self._on_message(message)
                if self._link is not link:
                    return
        if link.is_stale:
            self._drop()
            self._on_lost()
            self.start()
            return
        due_s = link.tick()
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if due_s is None else loop.call_at(max(due_s, loop.time() + 0.001), self._pump)
