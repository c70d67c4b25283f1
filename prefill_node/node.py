"""What a prefill worker does between two resets: run prompts in chunks, publish their KV, sample first tokens.

Owns the traffic between core, scheduler, runner and readers; the scheduler decides, the pool owns blocks. Invariant: a
run is published only after the step that wrote it has completed, and `Released` is sent once nothing is held for a key.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from pdserve import phases
from pdserve.blocks import BlockPool
from pdserve.channel import Hub
from pdserve.config import WorkerConfig
from pdserve.messages import (
    Counts,
    Drop,
    Failure,
    Key,
    Metric,
    Prefill,
    Published,
    Released,
    ReleaseLease,
    Renew,
    Roster,
    Run,
)
from pdserve.model.runner import Work
from pdserve.prefix import CacheChanges
from pdserve.worker.body import peer_endpoint, step_deadline_s
from pdserve.worker.control import Control
from pdserve.worker.engine import Engine
from pdserve.worker.sampling import extras_of, sample_rows, token_out
from pdserve.worker.stats import StepTimes, metric
from pdserve.worker.vitals import Vitals
from prefill_node.plan import Chunk, PrefillConfig, Prompt
from prefill_node.scheduler import PrefillScheduler

EXPIRE_EVERY_S = 0.5


@dataclass(slots=True)
class _Job:
    """A prompt on its way, until its reader has it or the core drops it."""

    prefill: Prefill
    published: int = 0  # tokens
    is_complete: bool = False  # the last run is out, or nobody reads


class PrefillNode:
    def __init__(
        self,
        config: WorkerConfig,
        engine: Engine,
        vitals: Vitals,
        *,
        epoch: str,
        control: Control,
        context: zmq.Context[zmq.Socket[bytes]],
    ) -> None:
        self._engine = engine
        self._vitals = vitals
        self._control = control
        self._header = engine.pool.header
        self._blocks = BlockPool(engine.pool.num_blocks, engine.layout.block_size, on_recycle=self._header.bump)
        options = config.engine
        self._scheduler = PrefillScheduler(
            self._blocks,
            PrefillConfig(
                token_budget=options.max_batched_tokens,
                chunk_tokens=options.chunk_tokens,
                policy=options.prefill_policy,  # type: ignore[arg-type]
                lease_ttl_s=config.timeouts.lease_ttl_s,
            ),
        )
        self._readers = Hub(context, peer_endpoint(config, epoch), epoch)
        self.endpoint = self._readers.endpoint
        self._jobs: dict[Key, _Job] = {}
        self._unreleased: set[Key] = set()  # known here and not yet reported as gone
        self._steps = StepTimes()
        self._is_proved = False  # `check` has run since the last request was here

    # Life

    def handle(self, message: Any, now_s: float) -> None:
        match message:
            case Prefill():
                self._add(message)
            case Drop(key=key):
                self._jobs.pop(key, None)
                self._scheduler.abort(key)
                if key not in self._unreleased:  # never heard of, or told already: the answer is the same
                    self._control.send(Released(key=key))
            case Roster(peers=peers):
                self._forget_readers({peer.epoch for peer in peers})
            case _:
                pass

    def turn(self, now_s: float) -> bool:
        self._hear_readers(now_s)
        chunks = self._scheduler.plan(now_s) if self._control.has_room else []
        for key in self._jobs:
            self._publish(key)
        if chunks:
            self._run(chunks)
        self._report_gone()
        self._readers.tick()
        return bool(chunks)

    def sockets(self) -> list[Any]:
        return [self._readers.socket]

    def next_due_s(self, now_s: float) -> float | None:
        due = [t for t in (self._readers.tick(), now_s + EXPIRE_EVERY_S if self._jobs else None) if t is not None]
        return min(due) if due else None

    def held(self) -> Sequence[Key]:
        return self._scheduler.held()

    def leases(self) -> Sequence[Key]:
        return self._scheduler.leased()

    def counts(self) -> Counts:
        if not self._unreleased and not self._is_proved:
            self._scheduler.check()
        self._is_proved = not self._unreleased
        return self._blocks.counts()

    def num_running(self) -> int:
        return self._scheduler.num_running

    def metrics(self) -> list[Metric]:
        return [
            metric("pdserve_leases_expired_total", self._scheduler.leases.num_expired),
            metric("pdserve_cached_tokens_total", self._scheduler.num_cached_tokens, pool="prefill"),
            metric("pdserve_evicted_blocks_total", self._blocks.num_evicted, pool="prefill"),
            metric("pdserve_step_seconds_sum", self._steps.seconds, pool="prefill"),
            metric("pdserve_step_seconds_count", self._steps.count, pool="prefill"),
            *(
                metric("pdserve_messages_ignored_total", number, reason=reason)
                for reason, number in self._readers.ignored.items()
            ),
        ]

    def cache_changes(self, *, is_snapshot: bool) -> CacheChanges:
        return self._blocks.snapshot() if is_snapshot else self._blocks.take_events()

    def close(self) -> None:
        self._readers.close()

    # inside

    def _add(self, prefill: Prefill) -> None:
        if prefill.key in self._unreleased:
            return
        self._unreleased.add(prefill.key)
        prompt = Prompt(
            key=prefill.key,
            tokens=prefill.tokens,
            extras=extras_of(self._engine.layout.model, prefill.salt),
            priority=prefill.priority,
            has_reader=bool(prefill.reader),
        )
        if not self._scheduler.add(prompt):
            reason = f"{len(prefill.tokens)} tokens do not fit into a pool of {self._blocks.usable} blocks"
            self._control.send(Failure(key=prefill.key, kind="refused", reason=reason))
            return
        self._jobs[prefill.key] = _Job(prefill)
        if prefill.reader:
            self._readers.expect(prefill.reader)

    def _hear_readers(self, now_s: float) -> None:
        for _, message, _ in self._readers.receive():
            match message:
                case Renew(keys=keys):
                    self._scheduler.renew(keys, now_s)
                case ReleaseLease(key=key):
                    self._scheduler.release(key)
                    if key in self._jobs:
                        self._jobs[key].is_complete = True
                case _:
                    self._readers.ignored["unexpected"] += 1

    def _forget_readers(self, alive: set[str]) -> None:
        for reader in self._readers.peers():
            if reader not in alive:
                self._readers.forget(reader)

    def _run(self, chunks: Sequence[Chunk]) -> None:
        started_s = time.monotonic()
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        self._vitals.turn(deadline_s=step_deadline_s(num_tokens, self._engine.prefill_tokens_per_s))
        for chunk in chunks:
            if chunk.is_first:
                cached = self._scheduler.cached_tokens(chunk.key)
                self._control.stamp(chunk.key, phases.PREFILL_STARTED, cached)
        results = self._engine.runner.step([self._work(chunk) for chunk in chunks])
        now_s = time.monotonic()
        self._steps.note(now_s - started_s)
        for chunk, drawn in zip(chunks, results, strict=True):
            if not self._scheduler.completed(chunk, now_s):
                continue
            self._publish(chunk.key)
            if chunk.is_last:
                position = chunk.start + chunk.num_tokens
                for sample, sampled in enumerate(drawn):
                    self._control.token(token_out(chunk.key, sample, position, sampled))
                self._control.stamp(chunk.key, phases.FIRST_TOKEN_READY)

    def _work(self, chunk: Chunk) -> Work:
        prefill = self._jobs[chunk.key].prefill
        rows = sample_rows(prefill.sampling, prefill.tokens, prefill.num_prompt) if chunk.is_last else ()
        return Work(tokens=chunk.tokens, start=chunk.start, block_table=chunk.blocks, sample=rows)

    def _publish(self, key: Key) -> None:
        """What has been computed and not yet published goes to the reader; a full window means: again next turn."""
        job = self._jobs.get(key)
        if job is None or job.is_complete or not job.prefill.reader:
            return
        computed, size = self._scheduler.publishable(key), self._blocks.block_size
        if computed <= job.published:
            return
        blocks = tuple(self._scheduler.table(key)[job.published // size : self._blocks.blocks_for(computed)])
        run = Run(
            first_position=job.published,
            num_tokens=computed - job.published,
            blocks=blocks,
            generations=self._header.generations(blocks),
        )
        is_last = computed == len(job.prefill.tokens)
        if self._readers.send(job.prefill.reader, Published(key=key, runs=(run,), is_last=is_last)):
            job.published, job.is_complete = computed, is_last

    def _report_gone(self) -> None:
        for key in [key for key in self._unreleased if self._scheduler.is_gone(key)]:
            self._unreleased.discard(key)
            self._jobs.pop(key, None)
            self._control.send(Released(key=key))
