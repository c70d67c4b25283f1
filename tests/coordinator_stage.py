"""A stage for the core's state machine: fake workers and front ends that say exactly what a test tells them to.

Every step is followed by `check()`, and what went out is kept per peer, so a test reads as a conversation.
"""

from __future__ import annotations

from typing import Any

from coordinator.events import Action, Event, FromFront, FromSupervisor, FromWorker, HeartbeatSeen, Send, Tell, Tick
from coordinator.machine import Machine
from pdserve import phases
from pdserve.config import CoreConfig, CoreOptions, TimeoutOptions
from pdserve.layout import KVLayout
from pdserve.messages import (
    Abandon,
    Counts,
    DrainWorker,
    Ended,
    Failure,
    Heartbeat,
    Key,
    Land,
    Output,
    PeerInfo,
    Prefill,
    Released,
    SampleEnded,
    Stamp,
    StepReport,
    StopFound,
    Submit,
    TokenOut,
    WorkerHello,
)
from pdserve.request import Sampling

BLOCK = 4
EOS = 2
STOP_TOKEN = 77  # the token whose text is the stop string "stop"
LAYOUT = KVLayout(model="m", dtype="float32", num_layers=1, num_kv_heads=1, head_dim=2, block_size=BLOCK)


def hello(name: str, role: str, epoch: str = "", **changes: Any) -> WorkerHello:
    info = PeerInfo(
        name=name,
        role=role,
        epoch=epoch or f"{name}.1",
        endpoint=f"ipc://{name}",
        layout=changes.pop("layout", LAYOUT),
        num_blocks=changes.pop("num_blocks", 101),
        links=(),
    )
    fields = {
        "info": info,
        "pid": 1,
        "host": "h",
        "device": "cpu:0",
        "model": "m",
        "max_model_len": 400,
        "max_running": 64,
        "prefill_tokens_per_s": 1000.0,
        "weight_bytes": 1,
    }
    return WorkerHello(**(fields | changes))


def submit(ticket: int, prompt: int = 6, **changes: Any) -> Submit:
    """A prompt of so many tokens; sampling fields and message fields by name."""
    own = {name: changes.pop(name) for name in list(changes) if name in Submit.__slots__}
    sampling = Sampling(**({"max_tokens": 8, "eos_token_ids": (EOS,)} | changes))
    fields = {
        "ticket": ticket,
        "prompt": tuple(range(100 + ticket, 100 + ticket + prompt)),
        "sampling": sampling,
        "stop": (),
        "priority": 0,
        "tenant": "",
        "salt": "",
        "received_ns": 0,
        "timeout_s": 600.0,
    }
    return Submit(**(fields | own))


def core_config(**changes: Any) -> CoreConfig:
    """Changes of a flag of the core, of a timeout, or of a field, by name."""

    def taken(names: Any) -> dict[str, Any]:
        return {name: changes.pop(name) for name in list(changes) if name in names}

    core, timeouts = CoreOptions(**taken(CoreOptions.__slots__)), TimeoutOptions(**taken(TimeoutOptions.__slots__))
    fields: dict[str, Any] = {
        "is_colocated": False,
        "max_model_len": 0,
        "landing_share": 0.25,
        "chunk_tokens": 512,
        "max_batched_tokens": 2048,
        "model_dir": "",
        "endpoint": "",
        "run_dir": "",
    }
    return CoreConfig(core=core, timeouts=timeouts, **(fields | changes))


class Stage:
    def __init__(self, prefill: int = 1, decode: int = 1, *, pool: int = 100, running: int = 64, **limits: Any) -> None:
        self.machine = Machine(
            config=core_config(**limits),
            core="c",
            stops_at_first=lambda token, stops: token == STOP_TOKEN and bool(stops),
        )
        self.now_s = 0.0
        self.sent: dict[str, list[Any]] = {}
        self.told: list[Any] = []
        self.last: list[Action] = []
        for role, count in (("prefill", prefill), ("decode", decode)):
            for index in range(count):
                self.join(f"{role[0]}{index}", role, num_blocks=pool + 1, max_running=running)

    def step(self, event: Event) -> list[Action]:
        self.last = self.machine.step(event, self.now_s)
        self.machine.check()
        for action in self.last:
            if isinstance(action, Send):
                self.sent.setdefault(action.to, []).append(action.message)
            elif isinstance(action, Tell):
                self.told.append(action.message)
        return self.last

    def wait(self, seconds: float) -> list[Action]:
        self.now_s += seconds
        return self.step(Tick())

    # --- what peers say

    def join(self, name: str, role: str, epoch: str = "", **changes: Any) -> list[Action]:
        message = hello(name, role, epoch, **changes)
        return self.step(FromWorker(message.info.epoch, message))

    def submit(self, ticket: int = 1, prompt: int = 6, *, front: str = "f", **changes: Any) -> list[Action]:
        return self.step(FromFront(front, submit(ticket, prompt, **changes)))

    def abandon(self, ticket: int = 1) -> list[Action]:
        return self.step(FromFront("f", Abandon(ticket=ticket, reason="the client left")))

    def found_stop(self, num_generated: int, *, ticket: int = 1, sample: int = 0) -> list[Action]:
        return self.step(FromFront("f", StopFound(ticket=ticket, sample=sample, num_generated=num_generated)))

    def tokens(self, worker: str, key: Key, first: int, *tokens: int, sample: int = 0) -> list[Action]:
        """Consecutive tokens from position `first` on."""
        outs = tuple(
            TokenOut(key=key, sample=sample, position=first + at, token=token, logprob=None, top=())
            for at, token in enumerate(tokens)
        )
        return self.step(FromWorker(worker, StepReport(tokens=outs, stamps=())))

    def stamp(self, worker: str, key: Key, name: str, value: int = 0) -> list[Action]:
        stamp = Stamp(key=key, name=name, time_ns=round(self.now_s * 1e9), value=value)
        return self.step(FromWorker(worker, StepReport(tokens=(), stamps=(stamp,))))

    def landed(self, worker: str, key: Key) -> list[Action]:
        return self.stamp(worker, key, phases.TRANSFER_DONE)

    def released(self, worker: str, key: Key) -> list[Action]:
        return self.step(FromWorker(worker, Released(key=key)))

    def fail(self, worker: str, key: Key, kind: str) -> list[Action]:
        return self.step(FromWorker(worker, Failure(key=key, kind=kind, reason="because")))

    def drain(self, name: str) -> list[Action]:
        return self.step(FromSupervisor(DrainWorker(worker=name)))

    def beat(self, worker: str, *held: Key, step: int = 0) -> list[Action]:
        heartbeat = Heartbeat(
            worker=worker.split(".")[0],
            epoch=worker,
            sent_ns=0,
            step=step,
            deadline_ns=0,
            phase="serving",
            held=held,
            leases=(),
            counts=Counts(free=1, cached=0, held=0, landing=0, draining=0),
            num_running=0,
            metrics=(),
        )
        return self.step(HeartbeatSeen(heartbeat))

    # --- what was sent

    def to(self, peer: str, kind: type) -> list[Any]:
        return [message for message in self.sent.get(peer, []) if isinstance(message, kind)]

    def prefill(self, peer: str = "p0.1") -> Prefill:
        return self.to(peer, Prefill)[-1]

    def land(self, peer: str = "d0.1") -> Land:
        return self.to(peer, Land)[-1]

    def ended(self, ticket: int = 1) -> Ended | None:
        found = [message for message in self.to("f", Ended) if message.ticket == ticket]
        assert len(found) <= 1, found
        return found[0] if found else None

    def text(self, ticket: int = 1, sample: int = 0) -> list[int]:
        """Everything the client was sent, in order and without a gap."""
        tokens: list[int] = []
        for message in self.to("f", Output):
            if (message.ticket, message.sample) == (ticket, sample):
                assert message.first == len(tokens), (message, tokens)
                tokens += [each.token for each in message.tokens]
        return tokens

    def sample_ends(self, ticket: int = 1) -> list[tuple[int, str, int]]:
        found = [message for message in self.to("f", SampleEnded) if message.ticket == ticket]
        return [(message.sample, message.reason, message.num_generated) for message in found]

    def decoding(self, ticket: int = 1, prompt: int = 6, first: int = 10, **changes: Any) -> Key:
        """A request whose first token came from p0 and whose KV has landed on d0."""
        self.submit(ticket, prompt, **changes)
        key = self.prefill().key
        self.tokens("p0.1", key, prompt, first)
        self.landed("d0.1", key)
        self.released("p0.1", key)
        return key

    def nothing_leaked(self) -> None:
        assert self.machine.num_live == 0
        assert self.machine.num_promises == 0
