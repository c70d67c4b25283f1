"""One front end process: a listening socket, uvicorn, and an orderly end.

Owns signals and shutdown. Invariant: after SIGTERM nothing new is accepted, running requests finish or are told why
not by the deadline, and the process exits 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator

import uvicorn
import uvloop

from coordinator.frontend.app import build_app
from coordinator.frontend.client import Connect
from coordinator.frontend.front import Front, leaving
from pdserve.config import FrontConfig

log = logging.getLogger("pdserve.front")
_BACKLOG = 2048
UVICORN_TICKS = 5  # of 0.1 s: how many of its turns uvicorn takes at once
_LAST_WORDS_S = 1.0  # for error events to reach their clients


def _limit_stalls(listener: socket.socket, timeout_s: float) -> None:
    """Inherited by connections: the kernel drops a client that takes nothing for that long."""
    if hasattr(socket, "TCP_USER_TIMEOUT") and listener.family in (socket.AF_INET, socket.AF_INET6):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))


def run(config: FrontConfig, connect: Connect, sock: socket.socket) -> int:
    """Serve on `sock`, which is listening and may be shared, until SIGTERM or SIGINT; the exit status."""
    server = FrontServer(config, connect, sock)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(server.serve())


class FrontServer:
    """The first `stop` lets running requests finish, the second ends them; signals do the same."""

    def __init__(self, config: FrontConfig, connect: Connect, sock: socket.socket) -> None:
        self.front = Front(config, connect)
        self._timeout_s = config.drain_s
        self._listener = sock
        _limit_stalls(self._listener, config.http.client_stall_timeout_s)
        self._server = QuietServer(_uvicorn_config(self.front))
        self._timers: list[asyncio.TimerHandle] = []

    async def serve(self) -> int:
        """Returns 0 when stopped."""
        loop = asyncio.get_running_loop()
        lag = loop.create_task(self.front.metrics.watch_lag(every_s=1.0, now_s=time.monotonic))
        self.front.client.start()
        with _signals(loop, self.stop):
            try:
                await self._server.serve(sockets=[self._listener])
            finally:
                lag.cancel()
                for timer in self._timers:
                    timer.cancel()
                self.front.close()
        return 0

    def stop(self) -> None:
        if self.front.is_leaving:
            self._end_requests()
            return
        self.front.is_leaving = True
        self._server.should_exit = True
        self._later(self._timeout_s, self._end_requests)
        log.info("shutting down; %d requests have %g s to finish", self.front.client.num_open, self._timeout_s)

    def _end_requests(self) -> None:
        """Whoever is still there is told; then connections are closed as they are."""
        self.front.client.interrupt_all(leaving())
        self._later(_LAST_WORDS_S, self._force)

    def _force(self) -> None:
        self._server.force_exit = True

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(delay_s, action))


class QuietServer(uvicorn.Server):
    """uvicorn without its signal handling, which would end the process by the signal and not with status 0."""

    async def main_loop(self) -> None:
        """uvicorn's, at a fifth of its pace: ten wake-ups a second are most of what an idle server costs."""
        counter = 0
        while not await self.on_tick(counter):
            counter = (counter + UVICORN_TICKS) % 864_000
            await asyncio.sleep(0.1 * UVICORN_TICKS)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _uvicorn_config(front: Front) -> uvicorn.Config:
    return uvicorn.Config(
        build_app(front),
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(front.config.drain_s + 2 * _LAST_WORDS_S) + 1,
    )


@contextlib.contextmanager
def _signals(loop: asyncio.AbstractEventLoop, ask: Callable[[], None]) -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT)
    installed = []
    for number in numbers:
        with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: whoever owns it handles signals
            loop.add_signal_handler(number, ask)
            installed.append(number)
    try:
        yield
    finally:
        for number in installed:
            loop.remove_signal_handler(number)
