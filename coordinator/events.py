"""What the core's state machine is told and what it asks for.

Owns the envelopes around messages; the messages themselves are `pdserve.messages`. Invariant: an event says who sent it
by epoch, so the machine never needs a socket to know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdserve.messages import (
    Abandon,
    CacheEvents,
    DrainWorker,
    Failure,
    Heartbeat,
    Released,
    StepReport,
    StopFound,
    Submit,
    WorkerGone,
    WorkerHello,
    WorkerState,
)

FrontMessage = Submit | Abandon | StopFound
WorkerMessage = WorkerHello | StepReport | Released | Failure | CacheEvents


@dataclass(frozen=True, slots=True)
class FromFront:
    front: str  # epoch
    message: FrontMessage


@dataclass(frozen=True, slots=True)
class FrontLost:
    """A front end is gone, and every client with it."""

    front: str


@dataclass(frozen=True, slots=True)
class FromWorker:
    worker: str  # epoch
    message: WorkerMessage


@dataclass(frozen=True, slots=True)
class HeartbeatSeen:
    heartbeat: Heartbeat


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """Silent, past its deadline, or gone: dead from now on, whatever it says later (law 7)."""

    worker: str  # epoch
    reason: str


@dataclass(frozen=True, slots=True)
class FromSupervisor:
    message: DrainWorker | WorkerGone


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; due by `Machine.next_deadline_s()`."""


Event = FromFront | FrontLost | FromWorker | HeartbeatSeen | WorkerLost | FromSupervisor | Tick


@dataclass(frozen=True, slots=True)
class Send:
    """To a live peer, by epoch, in its session."""

    to: str
    message: Any


@dataclass(frozen=True, slots=True)
class Tell:
    """To the supervisor, if there is one."""

    message: WorkerState


@dataclass(frozen=True, slots=True)
class ResetPeer:
    """Forget this epoch, dead or unknown here, so that whatever it says next is answered with a reset."""

    epoch: str


@dataclass(frozen=True, slots=True)
class Ignored:
    """Counted, not acted on; `reason` is a metric label."""

    reason: str


Action = Send | Tell | ResetPeer | Ignored
