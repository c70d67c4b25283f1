"""The coordinator core's process: sockets, timers and heartbeats around the pure state machine.

Owns the hub that everybody connects to, and who is a front end, a worker or the supervisor; decides nothing about
requests. Invariant: the loop never waits for a peer; whoever does not take its messages is as good as lost (law 12).
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import zmq

from coordinator.events import (
    Action,
    Event,
    FromFront,
    FromSupervisor,
    FromWorker,
    FrontLost,
    HeartbeatSeen,
    ResetPeer,
    Send,
    Tell,
    Tick,
    WorkerLost,
)
from coordinator.liveness import Liveness
from coordinator.machine import Machine
from coordinator.probes import Probes
from pdserve.channel import Hub, new_epoch
from pdserve.config import CoreConfig
from pdserve.errors import ConfigError
from pdserve.messages import (
    Abandon,
    DrainWorker,
    FrontHello,
    Heartbeat,
    Pong,
    Probe,
    Query,
    QueryReply,
    StopFound,
    Submit,
    SupervisorHello,
    WorkerGone,
    WorkerHello,
)
from pdserve.options import from_plain

CHECK_LIVENESS_S = 0.25
LONGEST_WAIT_S = 0.5
FRONT_SILENCE_S = 10.0


class Core:
    def __init__(self, config: CoreConfig, stops_at_first: Callable[[int, Sequence[str]], bool]) -> None:
        epoch = new_epoch()
        self._config = config
        self._hub = Hub(zmq.Context(), config.endpoint, epoch)
        self.control_endpoint = self._bind_control()
        self._machine = Machine(config=config, core=secrets.token_hex(4), stops_at_first=stops_at_first)
        self._liveness = Liveness(heartbeat_timeout_s=config.timeouts.heartbeat_timeout_s)
        self._probes = Probes()
        self._fronts: dict[str, str] = {}  # epoch -> name
        self._supervisor = ""

    def run(self) -> None:
        """Until the process is ended."""
        poller = zmq.Poller()
        poller.register(self._hub.socket, zmq.POLLIN)
        next_check_s = 0.0
        while True:
            now_s = time.monotonic()
            for source, message, identity in self._hub.receive():
                self._on_message(source, message, identity, now_s)
            if now_s >= next_check_s:
                next_check_s = now_s + CHECK_LIVENESS_S
                self._check_peers(now_s)
            deadline_s = self._machine.next_deadline_s()
            if deadline_s is not None and now_s >= deadline_s:
                self._do(Tick(), now_s)
            times = [t for t in (self._hub.tick(), self._machine.next_deadline_s(), next_check_s) if t is not None]
            wait_s = min([LONGEST_WAIT_S, *(t - time.monotonic() for t in times)])
            poller.poll(max(0, math.ceil(wait_s * 1000)))

    # events

    def _on_message(self, source: str, message: Any, identity: bytes | None, now_s: float) -> None:
        match message:
            case Heartbeat() if identity is not None:
                if self._liveness.heard(message, now_s):
                    self._do(HeartbeatSeen(message), now_s)
            case _ if identity is not None:
                self._hub.ignored["unexpected_raw"] += 1
            case FrontHello(name=name):
                self._fronts[source] = name
            case SupervisorHello():
                self._supervisor = source
            case Submit() | Abandon() | StopFound() if source in self._fronts:
                self._do(FromFront(source, message), now_s)
            case Probe(nonce=nonce):
                self._probe(source, nonce, now_s)
            case Query(nonce=nonce, what=what):
                self._hub.send(source, QueryReply(nonce=nonce, body=self._answer(what)))
            case DrainWorker() | WorkerGone() if source == self._supervisor:
                self._from_supervisor(message, now_s)
            case Pong(nonce=nonce):
                self._reply(self._probes.pong(source, nonce))
            case WorkerHello():
                self._do(FromWorker(source, message), now_s)
                if self._machine.is_known(source):
                    self._liveness.register(source, now_s)
            case _:
                self._do(FromWorker(source, message), now_s)

    def _from_supervisor(self, message: DrainWorker | WorkerGone, now_s: float) -> None:
        if isinstance(message, WorkerGone):
            for epoch in [epoch for epoch, name in self._fronts.items() if name == message.worker]:
                self._front_lost(epoch, now_s)
        self._do(FromSupervisor(message), now_s)

    def _check_peers(self, now_s: float) -> None:
        for epoch, reason in self._liveness.suspects(now_s):
            self._lose(epoch, reason, now_s)
        for epoch in [epoch for epoch in self._fronts if self._hub.silent_s(epoch) > FRONT_SILENCE_S]:
            self._front_lost(epoch, now_s)
        for epoch in self._hub.peers():  # refused, and now gone
            if not self._is_peer(epoch) and self._hub.silent_s(epoch) > FRONT_SILENCE_S:
                self._hub.forget(epoch)
        for reply in self._probes.overdue(now_s):
            self._reply(reply)

    def _is_peer(self, epoch: str) -> bool:
        return epoch in self._fronts or epoch == self._supervisor or self._machine.is_known(epoch)

    def _front_lost(self, epoch: str, now_s: float) -> None:
        del self._fronts[epoch]
        self._hub.forget(epoch)
        self._do(FrontLost(epoch), now_s)

    def _lose(self, epoch: str, reason: str, now_s: float) -> None:
        self._hub.forget(epoch)
        self._liveness.forget(epoch)
        self._do(WorkerLost(epoch, reason), now_s)

    # actions

    def _do(self, event: Event, now_s: float) -> None:
        for action in self._machine.step(event, now_s):
            self._act(action, now_s)

    def _act(self, action: Action, now_s: float) -> None:
        match action:
            case Send(to, message):
                if not self._hub.send(to, message):
                    self._not_taken(to, now_s)
            case Tell(message):
                if message.state == "suspect":
                    self._hub.forget(message.epoch)
                    self._liveness.forget(message.epoch)
                if self._supervisor:
                    self._hub.send(self._supervisor, message)
            case ResetPeer(epoch):
                self._hub.forget(epoch)
            case _:
                pass

    def _not_taken(self, peer: str, now_s: float) -> None:
        """Its window is full: it has not read for so long that it counts as lost."""
        if peer in self._fronts:
            self._front_lost(peer, now_s)
        elif self._machine.is_known(peer):
            self._lose(peer, "it does not take its messages", now_s)

    # questions

    def _probe(self, source: str, nonce: int, now_s: float) -> None:
        is_ready, detail = self._machine.readiness(now_s)
        workers = self._machine.probe_targets() if is_ready else []
        self._reply(self._probes.begin(source, nonce, workers, (is_ready, detail), now_s))
        for worker, ping in self._probes.pings():
            self._hub.send(worker, ping)

    def _reply(self, reply: tuple[str, Any] | None) -> None:
        if reply is not None:
            self._hub.send(*reply)

    def _answer(self, what: str) -> str:
        if what == "metrics":
            return self._machine.metrics_text(self._hub.ignored)
        if what == "requests":
            return json.dumps(self._machine.snapshot_requests())
        pools = self._machine.snapshot_pools()
        pools["control"] = self.control_endpoint
        return json.dumps({**pools, "max_request_tokens": self._machine.max_request_tokens})

    def _bind_control(self) -> str:
        """The TCP address for workers started by hand: the same port again after a restart of this process."""
        record = Path(self._config.run_dir) / "control"
        address = record.read_text() if record.exists() else f"tcp://{self._config.core.control}"
        try:
            endpoint = self._hub.bind(address.replace(":0", ":*") if address.endswith(":0") else address)
        except zmq.ZMQError as error:
            raise ConfigError(f"--control {address.removeprefix('tcp://')}: {error.strerror}") from None
        record.write_text(endpoint)
        return endpoint


def first_token_rule(model_dir: str) -> Callable[[int, Sequence[str]], bool]:
    """Whether a stop string stands in the text of a first token; the front end looks at all later ones."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(model_dir) / "tokenizer.json"))

    def stops_at_first(token: int, stops: Sequence[str]) -> bool:
        text = tokenizer.decode([token], skip_special_tokens=True) if stops else ""
        return any(stop in text for stop in stops)

    return stops_at_first


def main(plain: Mapping[str, Any]) -> int:
    config = from_plain(CoreConfig, plain)
    Core(config, first_token_rule(config.model_dir)).run()
    return 0
