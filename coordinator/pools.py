"""The workers' side of the state machine: registration, loss, draining, and what they let go of.

Owns what follows from a worker's coming and going; tokens are `tokens.py`'s. Invariant: whoever is missing in the last
roster is dead, and nothing stays promised on it.
"""

from __future__ import annotations

from coordinator import reconcile
from coordinator.attempts import give_up
from coordinator.events import ResetPeer, Tell
from coordinator.live import Live
from coordinator.workers import Worker
from coordinator.world import World
from pdserve.config import ROLES
from pdserve.messages import (
    CacheEvents,
    Drop,
    Failure,
    Heartbeat,
    Key,
    Leave,
    ResyncCache,
    Roster,
    WorkerGone,
    WorkerHello,
    WorkerState,
)


class Pools:
    def __init__(self, world: World) -> None:
        self._world = world
        self._num_resyncs = 0

    def hello(self, epoch: str, hello: WorkerHello) -> None:
        world, info = self._world, hello.info
        if epoch != info.epoch or info.role not in ROLES:
            world.ignore("bad_hello")
            return
        former = world.workers.named(info.name)
        if former is not None:
            self.lost(former.epoch, "its name came back with a new epoch")
        layout = world.workers.layout
        difference = layout.difference(info.layout) if layout else None
        if difference:
            reason = f"KV cannot be exchanged with the pools here: {difference}"
            world.send(epoch, Leave(reason=reason))
            world.out.append(Tell(WorkerState(worker=info.name, epoch=epoch, state="drained", reason=reason)))
            return
        worker = world.workers.add(hello, world.config.timeouts.heartbeat_timeout_s)
        world.ledger.open(epoch, worker.num_blocks)
        world.index.open(epoch)
        self._send_roster()
        self._tell(worker, "ready", "registered")
        world.make_room()

    def refuse(self, epoch: str) -> None:
        """Whatever a dead or unknown epoch says (law 7)."""
        self._world.ignore("dead_epoch")
        self._world.out.append(ResetPeer(epoch))

    def cache_events(self, worker: Worker, events: CacheEvents) -> None:
        if not self._world.index.apply(worker.epoch, events):
            self._num_resyncs += 1
            self._world.tally.count("pdserve_cache_event_gaps_total")
            self._world.send(worker.epoch, ResyncCache(nonce=self._num_resyncs))

    def lost(self, epoch: str, reason: str, *, by_supervisor: bool = False) -> None:
        """Dead from now on; what it had is placed again."""
        world = self._world
        keys = list(world.ledger.book(epoch).entries) if world.workers.get(epoch) else []
        worker = world.workers.lose(epoch)
        if worker is None:
            world.ignore("unknown_worker")
            return
        world.ledger.close(epoch)
        world.index.close(epoch)
        world.make_room()
        self._send_roster()
        if worker.state != "drained" and not by_supervisor:
            self._tell(worker, "suspect", reason)
        for key in keys:
            live = world.lives.placed(key)
            if live is not None and not self._is_done_with(live, worker):
                failure = Failure(key=key, kind="worker_lost", reason=f"{worker.role} worker {worker.name}: {reason}")
                give_up(world, live, failure, culprit=epoch)

    def released(self, worker: Worker, key: Key) -> None:
        world = self._world
        if not world.ledger.release(worker.epoch, key):
            world.ignore("unknown_key")
            return
        world.make_room()
        live = world.lives.placed(key)
        if live is not None and not self._has_prefilled(live, worker):
            failure = Failure(key=key, kind="internal", reason=f"{worker.name} let go of it too early")
            give_up(world, live, failure, culprit=worker.epoch)
        self._leave_if_drained(worker)

    def failure(self, worker: Worker, failure: Failure) -> None:
        live = self._world.lives.placed(failure.key)
        if live is None or live.placement is None or worker.epoch not in live.placement.workers:
            self._world.ignore("old_attempt")
            return
        if self._is_done_with(live, worker):
            self._world.ignore("late_failure")
            return
        is_about_owner = failure.kind in ("kv_unreadable", "owner_lost", "handoff_timeout")
        culprit = live.placement.prefill if is_about_owner else worker.epoch
        give_up(self._world, live, failure, culprit=culprit, counts=failure.kind != "yielded")

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        world = self._world
        worker = world.workers.get(heartbeat.epoch)
        if worker is None:
            self.refuse(heartbeat.epoch)
            return
        book = world.ledger.book(worker.epoch)
        wanted = frozenset(key for key in book.entries if world.lives.placed(key))
        found = reconcile.compare(worker, heartbeat, book, wanted, world.now_s)
        for key in found.strangers:
            world.tally.count("pdserve_reconciled_total", what="stranger")
            world.send(worker.epoch, Drop(key=key))
        for key in found.missing:
            world.tally.count("pdserve_reconciled_total", what="missing")
            self.released(worker, key)

    @staticmethod
    def _has_prefilled(live: Live, worker: Worker) -> bool:
        """It is the request's prefill worker, and every sample has the token that was to be sampled there."""
        placement = live.placement
        assert placement is not None
        reached = placement.num_tokens - live.num_prompt
        return worker.epoch == placement.prefill and all(len(each.tokens) > reached for each in live.running)

    def _is_done_with(self, live: Live, worker: Worker) -> bool:
        """The request no longer needs anything of this worker."""
        placement = live.placement
        return placement is not None and placement.is_landed and self._has_prefilled(live, worker)

    def drain(self, name: str) -> None:
        worker = self._world.workers.named(name)
        if worker is None or worker.state != "ready":
            self._world.ignore("unknown_worker" if worker is None else "duplicate_drain")
            return
        worker.state = "draining"
        self._tell(worker, "draining", "asked to")
        self._world.make_room()
        self._leave_if_drained(worker)

    def gone(self, gone: WorkerGone) -> None:
        worker = self._world.workers.named(gone.worker)
        epoch = gone.epoch or (worker.epoch if worker else "")
        self.lost(epoch, gone.reason, by_supervisor=True)

    def _leave_if_drained(self, worker: Worker) -> None:
        if worker.state == "draining" and self._world.ledger.is_empty(worker.epoch):
            worker.state = "drained"
            self._world.send(worker.epoch, Leave(reason="drained"))
            self._tell(worker, "drained", "it holds nothing")

    def _send_roster(self) -> None:
        roster = Roster(peers=self._world.workers.roster())
        for worker in self._world.workers.live():
            self._world.send(worker.epoch, roster)

    def _tell(self, worker: Worker, state: str, reason: str) -> None:
        told = WorkerState(worker=worker.name, epoch=worker.epoch, state=state, reason=reason)
        self._world.out.append(Tell(told))
