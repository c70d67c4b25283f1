"""What the engine loop last said of itself, and the thread that tells the core.

The loop writes, the thread reads; both touch one immutable snapshot, replaced whole. The thread proves that the process
lives, the loop's counter and deadline prove that it works (law 14). Invariant: the thread never waits for the loop.
"""

from __future__ import annotations

import dataclasses
import threading
import time

import zmq

from pdserve.channel import RawLink
from pdserve.messages import Counts, Heartbeat

LOADING_DEADLINE_S = 600.0
NO_COUNTS = Counts(free=0, cached=0, held=0, landing=0, draining=0)


class Vitals:
    """The loop's side. `deadline_s` is how long the step now starting may take at most."""

    def __init__(self, worker: str) -> None:
        self._last = Heartbeat(
            worker=worker,
            epoch="",
            sent_ns=0,
            step=0,
            deadline_ns=time.monotonic_ns() + int(LOADING_DEADLINE_S * 1e9),
            phase="loading",
            held=(),
            leases=(),
            counts=NO_COUNTS,
            num_running=0,
            metrics=(),
        )

    def update(self, **fields: object) -> None:
        """Replace fields of the heartbeat; call in the engine loop only."""
        self._last = dataclasses.replace(self._last, **fields)  # type: ignore[arg-type]

    def turn(self, *, deadline_s: float) -> None:
        """The loop begins another turn, which ends within `deadline_s`."""
        self.update(step=self._last.step + 1, deadline_ns=time.monotonic_ns() + int(deadline_s * 1e9))

    def heartbeat(self) -> Heartbeat:
        return dataclasses.replace(self._last, sent_ns=time.monotonic_ns())


class HeartbeatThread(threading.Thread):
    """Sends a heartbeat every `interval_s` until the process ends, whatever the loop does."""

    def __init__(self, vitals: Vitals, endpoint: str, *, interval_s: float) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._vitals = vitals
        self._endpoint = endpoint
        self._interval_s = interval_s
        self._stop = threading.Event()

    def run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        link = RawLink(context, self._endpoint, self._vitals.heartbeat().worker)
        while not self._stop.wait(self._interval_s):
            heartbeat = self._vitals.heartbeat()
            if heartbeat.epoch:
                link.send(heartbeat)
        link.close()
        context.destroy(linger=0)

    def stop(self) -> None:
        self._stop.set()
