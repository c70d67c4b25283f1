"""The body of a worker process: one life after another, each with its own epoch, until it is told to leave.

Owns epochs, the turn of the loop and what it waits for; a `Life` owns what the node does in a turn. Invariant: between
two lives nothing of the first survives but weights and memory: all generations are raised, every key forgotten (law 7).
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import zmq

from kv_transfer.offers import Exports
from pdserve.channel import new_epoch
from pdserve.config import WorkerConfig
from pdserve.messages import (
    CacheEvents,
    Counts,
    Key,
    Leave,
    Metric,
    PeerInfo,
    Ping,
    Pong,
    ResyncCache,
    WorkerHello,
)
from pdserve.prefix import CacheChanges
from pdserve.worker.control import Control
from pdserve.worker.engine import Engine
from pdserve.worker.stats import metric
from pdserve.worker.vitals import HeartbeatThread, Vitals

HEARTBEAT_S = 0.5
REPORT_EVERY_S = 0.5
LONGEST_WAIT_S = 1.0
TURN_DEADLINE_S = 5.0
UNHEARD_S = 10.0  # a coordinator that has not answered is named this often
SLOWDOWN = 20.0  # a step may take this many times what the start-up measurement predicts


class Life(Protocol):
    """What a node does between two resets."""

    endpoint: str  # of its peer socket; empty: nobody connects to it

    def handle(self, message: Any, now_s: float) -> None:
        """A message of the core."""

    def turn(self, now_s: float) -> bool:
        """Receive from peers, run at most one step, report. False when there was nothing to compute."""

    def sockets(self) -> list[Any]:
        """What may wake an idle loop, beside the core."""

    def next_due_s(self, now_s: float) -> float | None:
        """When an idle loop must turn again."""

    def held(self) -> Sequence[Key]: ...

    def leases(self) -> Sequence[Key]: ...

    def counts(self) -> Counts: ...

    def num_running(self) -> int: ...

    def metrics(self) -> list[Metric]: ...

    def cache_changes(self, *, is_snapshot: bool) -> CacheChanges: ...

    def close(self) -> None: ...


class Body:
    def __init__(self, config: WorkerConfig, engine: Engine, exports: Exports, vitals: Vitals) -> None:
        self._config = config
        self._engine = engine
        self._exports = exports
        self._vitals = vitals
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def run(self, start_life: Callable[[str, Control, zmq.Context[Any]], Life]) -> int:
        """Serve until told to leave or terminated; the exit status."""
        is_over: list[bool] = []
        signal.signal(signal.SIGTERM, lambda *_: is_over.append(True))
        while not is_over:
            epoch = new_epoch()
            self._engine.pool.header.set_epoch(epoch)
            control = Control(self._context, self._config.coordinator, epoch)
            life = start_life(epoch, control, self._context)
            control.send(self._hello(epoch, life))
            self._vitals.update(epoch=epoch, phase="serving")
            is_by_hand = not self._config.supervisor_pid
            has_left = _Loop(life, control, self._vitals, self._exports, is_by_hand=is_by_hand).run(is_over)
            life.close()
            control.close()
            if has_left:
                break
        self._context.destroy(linger=0)
        return 0

    def _hello(self, epoch: str, life: Life) -> WorkerHello:
        engine, config = self._engine, self._config
        return WorkerHello(
            info=PeerInfo(
                name=config.name,
                role=config.role,
                epoch=epoch,
                endpoint=life.endpoint,
                layout=engine.layout,
                num_blocks=engine.pool.num_blocks,
                links=self._exports.offers,
            ),
            pid=os.getpid(),
            host=socket.gethostname(),
            device=config.device,
            model=config.engine.model,
            max_model_len=engine.max_model_len,
            max_running=config.engine.max_running,
            prefill_tokens_per_s=engine.prefill_tokens_per_s,
            weight_bytes=engine.weight_bytes,
        )


class _Loop:
    """The turns of one life."""

    def __init__(self, life: Life, control: Control, vitals: Vitals, exports: Exports, *, is_by_hand: bool) -> None:
        self._life = life
        self._control = control
        self._vitals = vitals
        self._exports = exports
        self._next_report_s = 0.0
        self._num_events = 0
        self._is_by_hand = is_by_hand
        self._complain_s = time.monotonic() + UNHEARD_S

    def run(self, is_over: list[bool]) -> bool:
        """True: told to leave; False: this epoch is dead, or the process is asked to end."""
        poller = zmq.Poller()
        poller.register(self._control.socket, zmq.POLLIN)
        registered: list[Any] = []
        while not is_over and not self._control.is_lost:
            now_s = time.monotonic()
            self._vitals.turn(deadline_s=TURN_DEADLINE_S)
            for message in self._control.receive():
                if isinstance(message, Leave):
                    return True
                self._handle(message, now_s)
            is_busy = self._life.turn(now_s)
            self._report(now_s)
            self._control.flush()
            due_s = self._control.tick()
            if is_busy:
                continue
            registered = _register(poller, registered, self._life.sockets())
            times = [t for t in (due_s, self._life.next_due_s(now_s), self._next_report_s) if t is not None]
            wait_s = min([LONGEST_WAIT_S, *(t - time.monotonic() for t in times)])
            poller.poll(max(0, math.ceil(wait_s * 1000)))
        return False

    def _handle(self, message: Any, now_s: float) -> None:
        if isinstance(message, Ping):
            self._control.send(Pong(nonce=message.nonce))
        elif isinstance(message, ResyncCache):
            self._events(is_snapshot=True)
        else:
            self._life.handle(message, now_s)

    def _report(self, now_s: float) -> None:
        """Cache events as they come; what the heartbeat says of us twice a second."""
        self._events(is_snapshot=False)
        if now_s < self._next_report_s:
            return
        self._next_report_s = now_s + REPORT_EVERY_S
        if self._is_by_hand and self._control.is_known:
            self._is_by_hand = False
            print(f"serving for the coordinator at {self._control.endpoint}", file=sys.stderr, flush=True)
        if now_s >= self._complain_s and not self._control.is_known:
            self._complain_s = now_s + UNHEARD_S
            print(f"still waiting for the coordinator at {self._control.endpoint}", file=sys.stderr, flush=True)
        life = self._life
        strangers = metric("pdserve_messages_ignored_total", self._exports.num_ignored, reason="kv_stranger")
        self._vitals.update(
            held=tuple(life.held()),
            leases=tuple(life.leases()),
            counts=life.counts(),
            num_running=life.num_running(),
            metrics=(*life.metrics(), strangers),
        )

    def _events(self, *, is_snapshot: bool) -> None:
        changes = self._life.cache_changes(is_snapshot=is_snapshot)
        if not (changes.stored or changes.removed or is_snapshot):
            return
        self._control.send(
            CacheEvents(
                first=self._num_events,
                stored=tuple(changes.stored),
                removed=tuple(changes.removed),
                is_snapshot=is_snapshot,
            )
        )
        self._num_events += 1


def _register(poller: zmq.Poller, registered: list[Any], wanted: list[Any]) -> list[Any]:
    if registered != wanted:
        for gone in registered:
            poller.unregister(gone)
        for new in wanted:
            poller.register(new, zmq.POLLIN)
    return list(wanted)


def step_deadline_s(num_tokens: int, tokens_per_s: float) -> float:
    """How long a step may take before its worker counts as hung."""
    return TURN_DEADLINE_S + SLOWDOWN * num_tokens / tokens_per_s


def start_vitals(config: WorkerConfig) -> Vitals:
    vitals = Vitals(config.name)
    HeartbeatThread(vitals, config.coordinator, interval_s=HEARTBEAT_S).start()
    return vitals


def peer_endpoint(config: WorkerConfig, epoch: str) -> str:
    """Where this life's peers connect: a Unix socket in our private folder, new for each epoch."""
    return f"ipc://{Path(config.run_dir) / f'{config.name}-{epoch[:8]}'}"
