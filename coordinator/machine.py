"""The core's state machine: events in, actions out.

Owns the life of every request from submit to its one ending, and of every worker from hello to loss; has no socket, no
clock and no thread. `now_s` is CLOCK_MONOTONIC of the core's host. Invariant: `check()`; and no event, however late,
repeated or unknown, ever raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coordinator import views
from coordinator.admission import refusal
from coordinator.attempts import give_up, pump
from coordinator.events import (
    Action,
    Event,
    FromFront,
    FromSupervisor,
    FromWorker,
    FrontLost,
    FrontMessage,
    HeartbeatSeen,
    Tick,
    WorkerLost,
)
from coordinator.invariants import check
from coordinator.live import Live, Sample
from coordinator.outcomes import cancelled, end, failed, refuse
from coordinator.phases import Clock
from coordinator.pools import Pools
from coordinator.tokens import Tokens
from coordinator.world import Digests, StopsAtFirst, World
from pdserve.config import CoreConfig
from pdserve.layout import KVLayout
from pdserve.messages import (
    Abandon,
    CacheEvents,
    DrainWorker,
    Failure,
    Released,
    StepReport,
    StopFound,
    Submit,
    WorkerGone,
    WorkerHello,
)
from pdserve.prefix import block_digests, seed_extras


def prompt_digests(tokens: Any, layout: KVLayout, salt: str) -> list[bytes]:
    """As the workers name their cached blocks."""
    return block_digests(tokens, layout.block_size, seed_extras(model=layout.model, cache_salt=salt or None))


class Machine:
    """`core` is a random prefix that makes request ids unique over lives of the core."""

    def __init__(
        self, *, config: CoreConfig, core: str, stops_at_first: StopsAtFirst, digests: Digests = prompt_digests
    ) -> None:
        self._world = World(config=config, core=core)
        self._pools = Pools(self._world)
        self._tokens = Tokens(self._world, stops_at_first)
        self._digests = digests
        self._num_arrivals = 0

    def step(self, event: Event, now_s: float) -> list[Action]:
        world = self._world
        world.begin(now_s)
        match event:
            case FromFront(front, message):
                self._from_front(front, message)
            case FromWorker(epoch, message):
                self._from_worker(epoch, message)
            case HeartbeatSeen(heartbeat):
                self._pools.heartbeat(heartbeat)
            case FrontLost(front):
                for live in world.lives.of_front(front):
                    end(world, live, cancelled("the front end is gone"))
            case WorkerLost(epoch, reason):
                self._pools.lost(epoch, reason)
            case FromSupervisor(DrainWorker(worker=name)):
                self._pools.drain(name)
            case FromSupervisor(WorkerGone() as gone):
                self._pools.gone(gone)
            case Tick():
                pass
        self._tick()
        pump(world)
        return world.out

    def next_deadline_s(self) -> float | None:
        """When a `Tick` is due at the latest; None: never."""
        return self._world.timers.next_s()

    def readiness(self, now_s: float) -> tuple[bool, dict[str, Any]]:
        return views.readiness(self._world)

    def probe_targets(self) -> list[str]:
        """Epochs of the workers whose loops a new request would go through: one of each role it needs."""
        return views.probe_targets(self._world)

    def snapshot_pools(self) -> dict[str, Any]:
        return views.pools(self._world)

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output of the longest request that could be served now; 0: not known yet."""
        limits = [n for n in (self._world.config.max_model_len, self._world.workers.max_model_len) if n]
        return min(limits, default=0)

    def snapshot_requests(self) -> list[dict[str, Any]]:
        return views.requests(self._world)

    def metrics_text(self, ignored: Mapping[str, int] | None = None) -> str:
        """`ignored`: messages that never got here, by reason."""
        return views.metrics(self._world, ignored or {})

    @property
    def num_live(self) -> int:
        return len(self._world.lives)

    @property
    def num_promises(self) -> int:
        """Ledger entries that no worker has released yet."""
        return self._world.ledger.num_entries

    def count(self, name: str, **labels: str) -> float:
        """A counter's value."""
        return self._world.tally.value(name, **labels)

    def is_known(self, epoch: str) -> bool:
        """The worker's epoch is alive here."""
        return self._world.workers.get(epoch) is not None

    # --- front ends ---------------------------------------------------------------------------------------------------

    def _from_front(self, front: str, message: FrontMessage) -> None:
        world = self._world
        live = world.lives.ticket(front, message.ticket)
        match message:
            case Submit():
                if live is not None:
                    world.ignore("duplicate_ticket")
                else:
                    self._submit(front, message)
            case Abandon(reason=reason):
                if live is None:
                    world.ignore("unknown_ticket")
                else:
                    end(world, live, cancelled(reason))
            case StopFound():
                if live is None:
                    world.ignore("unknown_ticket")
                else:
                    self._tokens.stop(live, message)

    def _submit(self, front: str, submit: Submit) -> None:
        world = self._world
        world.tally.count("pdserve_requests_started_total")
        self._num_arrivals += 1
        timeout_s = min(submit.timeout_s, world.config.timeouts.request_timeout_s)
        layout = world.workers.layout
        live = Live(
            request=f"r-{world.core}-{self._num_arrivals}",
            front=front,
            submit=submit,
            arrival=self._num_arrivals,
            clock=Clock(submit.received_ns),
            due_s=world.now_s + (timeout_s if timeout_s > 0 else world.config.timeouts.request_timeout_s),
            digests=self._digests(submit.prompt, layout, submit.salt) if layout else [],
            samples=[Sample(index=index) for index in range(submit.sampling.n)],
        )
        if outcome := refusal(world, live):
            refuse(world, front, submit, outcome)
            return
        live.clock.admitted(world.now_ns)
        world.lives.add(live)
        world.wait(live)

    # --- workers ------------------------------------------------------------------------------------------------------

    def _from_worker(self, epoch: str, message: Any) -> None:
        world = self._world
        worker = world.workers.get(epoch)
        if worker is None and isinstance(message, WorkerHello) and not world.workers.is_dead(epoch):
            self._pools.hello(epoch, message)
            return
        if worker is None:
            self._pools.refuse(epoch)
            return
        match message:
            case StepReport():
                self._tokens.report(worker, message)
            case Released(key=key):
                self._pools.released(worker, key)
            case Failure():
                self._pools.failure(worker, message)
            case CacheEvents():
                self._pools.cache_events(worker, message)
            case _:
                world.ignore("unexpected_message")

    # --- time ---------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        world, timeouts = self._world, self._world.config.timeouts
        for live in world.timers.pop_due(world.now_s):
            placement = live.placement
            if world.now_s >= live.due_s:
                waited_s = world.now_s - live.submit.received_ns / 1e9
                end(world, live, failed(f"not finished within {waited_s:.1f} s", code="timeout", status=504))
            elif live.queue_due_s is not None and world.now_s >= live.queue_due_s:
                message = f"no worker had room for it within {timeouts.queue_timeout_s:g} s"
                retry_after_s = world.retry_after_s()
                end(world, live, failed(message, code="queue_timeout", status=503, retry_after_s=retry_after_s))
            elif placement and placement.landing_due_s is not None and world.now_s >= placement.landing_due_s:
                reason = f"{placement.decode_name} has not read the KV within {timeouts.handoff_wait_s:g} s"
                failure = Failure(key=placement.key, kind="handoff_timeout", reason=reason)
                give_up(world, live, failure, culprit=placement.decode)
            else:
                world.timers.push(live)

    def check(self) -> None:
        """Prove the invariants; raises AssertionError with the numbers."""
        check(self._world)
