"""What a decode worker does between two resets: take in KV, decode all running samples, prefill what is local.

Owns the traffic between core, scheduler, landings and runner; the scheduler decides, `landings.py` reads. Invariant: a
sample steps only after its KV was validated and its last token accepted, and `Released` is sent once nothing is held.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import zmq

from decode_node.landings import Landings, Outcome
from decode_node.plan import COMMON, Chunk, DecodeConfig, DecodePlan, DecodeRequest
from decode_node.samples import Sample
from decode_node.scheduler import DecodeScheduler
from kv_transfer.connect import Connector
from kv_transfer.offers import openers
from pdserve import phases
from pdserve.blocks import BlockPool
from pdserve.config import WorkerConfig
from pdserve.messages import (
    Counts,
    Drop,
    DropSample,
    Failure,
    Key,
    Land,
    Metric,
    Released,
    Roster,
    Start,
)
from pdserve.model.runner import Work
from pdserve.model.sampling import Sampled, SampleRow
from pdserve.prefix import CacheChanges
from pdserve.worker.body import step_deadline_s
from pdserve.worker.control import Control
from pdserve.worker.engine import Engine
from pdserve.worker.sampling import extras_of, seed_of, token_out
from pdserve.worker.stats import StepTimes, metric
from pdserve.worker.vitals import Vitals

ASK_AGAIN_S = 0.005
RENEWALS_PER_TTL = 10
LINK_REASONS = {"owner_lost": "owner_lost", "peer_gone": "owner_lost", "epoch": "owner_lost"}


class DecodeNode:
    endpoint = ""  # readers connect to owners; nobody connects here

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
        options = config.engine
        self._engine = engine
        self._vitals = vitals
        self._control = control
        self._slice_s = options.transfer_slice_ms / 1000
        self._renew_every_s = config.timeouts.lease_ttl_s / RENEWALS_PER_TTL
        self._renew_at_s = 0.0
        self._blocks = BlockPool(engine.pool.num_blocks, engine.layout.block_size, on_recycle=engine.pool.header.bump)
        self._scheduler = DecodeScheduler(
            self._blocks,
            DecodeConfig(
                max_running=options.max_running,
                max_batched_tokens=options.max_batched_tokens,
                chunk_tokens=options.chunk_tokens,
                landing_share=options.landing_share,
            ),
        )
        opening = openers(engine.pool, kinds=options.kv_link, context=context, slice_s=self._slice_s)
        self._landings = Landings(
            epoch=epoch,
            context=context,
            connector=Connector(pool=engine.pool, layout=engine.layout, openers=opening),
            block_bytes=engine.layout.block_bytes,
        )
        self._asking: dict[Key, Land] = {}  # landings that found no room yet
        self._known: set[Key] = set()  # told by the core, not yet released
        self._has_landed: set[Key] = set()
        self._has_started: set[Key] = set()
        self._has_stepped: set[Key] = set()
        self._steps = StepTimes()
        self._is_proved = False  # `check` has run since the last request was here

    # Life

    def handle(self, message: Any, now_s: float) -> None:
        match message:
            case Land():
                self._land(message)
            case Start(key=key, sample=sample, position=position, token=token):
                self._has_started.add(key)
                self._stamp_joined(key)
                self._scheduler.start(key, sample, position, token)
            case Drop(key=key):
                self._drop(key)
            case DropSample(key=key, sample=sample, num_generated=num_generated):
                self._scheduler.drop_sample(key, sample, num_generated)
            case Roster(peers=peers):
                self._landings.roster([peer for peer in peers if peer.role == "prefill"], now_s)
            case _:
                pass

    def turn(self, now_s: float) -> bool:
        for key in list(self._asking):
            self._ask(key)
        outcomes = self._landings.advance(now_s, self._slice_s)
        for key, time_ns in self._landings.take_started():  # a short read starts and ends in the same turn
            self._control.stamp(key, phases.TRANSFER_STARTED, self._scheduler.cached_tokens(key), time_ns=time_ns)
        for outcome in outcomes:
            self._landed(outcome)
        for key in self._landings.take_quiescent():
            self._scheduler.quiescent(key)
        if now_s >= self._renew_at_s:
            self._renew_at_s = now_s + self._renew_every_s
            self._landings.renew(now_s, [(key, land.owner) for key, land in self._asking.items()])
        has_run = self._control.has_room and self._step(now_s)
        for key in self._scheduler.take_gone():
            self._gone(key)
        return has_run or self._landings.is_moving

    def sockets(self) -> list[Any]:
        return self._landings.sockets()

    def next_due_s(self, now_s: float) -> float | None:
        due = [t for t in (self._landings.tick(),) if t is not None]
        if self._asking or self._scheduler.has_work():
            due.append(now_s + ASK_AGAIN_S)
        if self._landings.num_active:
            due.append(min(self._renew_at_s, now_s + 2 * ASK_AGAIN_S))
        return min(due) if due else None

    def held(self) -> Sequence[Key]:
        return self._scheduler.held()

    def leases(self) -> Sequence[Key]:
        return ()

    def counts(self) -> Counts:
        if not self._known and not self._is_proved:
            self._scheduler.check()
        self._is_proved = not self._known
        return self._blocks.counts()

    def num_running(self) -> int:
        return self._scheduler.num_running

    def metrics(self) -> list[Metric]:
        rows = [
            metric("pdserve_cached_tokens_total", self._scheduler.num_cached_tokens, pool="decode"),
            metric("pdserve_evicted_blocks_total", self._blocks.num_evicted, pool="decode"),
            metric("pdserve_preemptions_total", self._scheduler.num_preemptions, how="recompute"),
            metric("pdserve_recomputed_tokens_total", self._scheduler.num_recomputed_tokens),
            metric("pdserve_step_seconds_sum", self._steps.seconds, pool="decode"),
            metric("pdserve_step_seconds_count", self._steps.count, pool="decode"),
        ]
        for peer, reader in self._landings.readers():
            rows.append(metric("pdserve_transfers", reader.num_pending, link=reader.kind, peer=peer.name))
            rows.append(metric("pdserve_transfer_bytes_total", reader.num_bytes, link=reader.kind, peer=peer.name))
        for reason, number in self._landings.rejected.items():
            rows.append(metric("pdserve_reads_rejected_total", number, reason=reason))
        return rows

    def cache_changes(self, *, is_snapshot: bool) -> CacheChanges:
        return self._blocks.snapshot() if is_snapshot else self._blocks.take_events()

    def close(self) -> None:
        self._landings.close()

    # arriving

    def _land(self, land: Land) -> None:
        if land.key in self._known:
            return
        self._known.add(land.key)
        request = self._request(land)
        if not self._scheduler.fits_ever(request):
            reason = f"{len(land.tokens)} tokens and what follows do not fit into {self._blocks.usable} blocks"
            self._control.send(Failure(key=land.key, kind="refused", reason=reason))
        elif land.owner:
            self._asking[land.key] = land
            self._ask(land.key)
        else:
            self._scheduler.add(request)

    def _request(self, land: Land) -> DecodeRequest:
        return DecodeRequest(
            key=land.key,
            tokens=land.tokens,
            num_prompt=land.num_prompt,
            sampling=land.sampling,
            extras=extras_of(self._engine.layout.model, land.salt),
            priority=land.priority,
        )

    def _ask(self, key: Key) -> None:
        """Reserve blocks for a landing; without room it asks again each turn, and the core's patience bounds that."""
        land = self._asking[key]
        plan = self._scheduler.reserve_landing(self._request(land))
        if plan is not None:
            del self._asking[key]
            self._landings.begin(plan, land.owner, self._blocks.block_size)

    def _landed(self, outcome: Outcome) -> None:
        key = outcome.key
        if not outcome.reason:
            self._control.stamp(key, phases.TRANSFER_DONE, outcome.num_bytes)
            self._has_landed.add(key)
            self._stamp_joined(key)
            self._scheduler.landing_done(key)
            return
        self._scheduler.landing_failed(key)
        kind = LINK_REASONS.get(outcome.reason, "kv_unreadable")
        self._control.send(Failure(key=key, kind=kind, reason=f"its KV could not be read: {outcome.reason}"))

    def _stamp_joined(self, key: Key) -> None:
        if key in self._has_landed and key in self._has_started:
            self._has_landed.discard(key)
            self._control.stamp(key, phases.JOINED)

    # leaving

    def _drop(self, key: Key) -> None:
        self._asking.pop(key, None)
        is_known = key in self._scheduler.held()
        self._scheduler.drop(key)
        self._landings.abandon(key)
        if not is_known and self._scheduler.is_gone(key):
            self._gone(key)

    def _gone(self, key: Key) -> None:
        """Nothing is held any more; the answer to a `Drop` even of a key never heard of."""
        self._asking.pop(key, None)  # one that ended before it found room
        for each in (self._known, self._has_landed, self._has_started, self._has_stepped):
            each.discard(key)
        self._control.send(Released(key=key))

    # stepping

    def _step(self, now_s: float) -> bool:
        plan = self._scheduler.plan(now_s)
        for key in plan.yielded:
            self._landings.abandon(key)
            self._control.send(Failure(key=key, kind="yielded", reason="its blocks were needed by running requests"))
        for key in self._landings.take_quiescent():
            self._scheduler.quiescent(key)
        if plan.is_empty:
            self._scheduler.completed(plan)
            return False
        self._run(plan)
        return True

    def _run(self, plan: DecodePlan) -> None:
        started_s = time.monotonic()
        self._vitals.turn(deadline_s=step_deadline_s(plan.num_tokens, self._engine.prefill_tokens_per_s))
        self._stamp_starts(plan)
        runner = self._engine.runner
        if plan.copies:
            runner.copy_blocks(plan.copies)
        works = [_decode_work(sample) for sample in plan.decodes] + [self._chunk_work(chunk) for chunk in plan.chunks]
        results = runner.step(works)
        self._scheduler.completed(plan)
        self._steps.note(time.monotonic() - started_s)
        for sample, drawn in zip(plan.decodes, results, strict=False):
            self._tell(sample.key, sample.index, len(sample.tokens), drawn[0])
            if sample.key not in self._has_stepped:
                self._has_stepped.add(sample.key)
                self._control.stamp(sample.key, phases.SECOND_TOKEN)
        for chunk, drawn in zip(plan.chunks, results[len(plan.decodes) :], strict=True):
            for index, sampled in zip(chunk.draw, drawn, strict=True):
                self._tell(chunk.key, index, chunk.start + chunk.num_tokens, sampled)
            if chunk.draw and chunk.sample == COMMON:
                self._control.stamp(chunk.key, phases.FIRST_TOKEN_READY)

    def _stamp_starts(self, plan: DecodePlan) -> None:
        for sample in plan.decodes:
            if sample.key not in self._has_stepped:
                self._control.stamp(sample.key, phases.DECODE_STARTED)
        for chunk in plan.chunks:
            if chunk.is_first and chunk.sample == COMMON:
                self._control.stamp(chunk.key, phases.PREFILL_STARTED, self._scheduler.cached_tokens(chunk.key))

    def _tell(self, key: Key, index: int, position: int, sampled: Sampled) -> None:
        self._control.token(token_out(key, index, position, sampled))
        self._scheduler.token_sampled(key, index, position, sampled.token)

    def _chunk_work(self, chunk: Chunk) -> Work:
        rows = []
        for index in chunk.draw:
            sample = self._scheduler.sample(chunk.key, index)
            assert sample is not None, (chunk.key, index)
            rows.append(_row(sample))
        return Work(tokens=chunk.tokens, start=chunk.start, block_table=chunk.blocks, sample=tuple(rows))


def _row(sample: Sample) -> SampleRow:
    tokens, num_prompt, spec = sample.tokens, sample.num_prompt, sample.request.spec
    return SampleRow(
        sampling=spec.sampling,
        seed=seed_of(spec.sampling, sample.index),
        prompt=spec.tokens if len(spec.tokens) == num_prompt else tokens[:num_prompt],
        output=tokens[num_prompt:],
        position=len(tokens),
    )


def _decode_work(sample: Sample) -> Work:
    at = len(sample.tokens) - 1
    return Work(tokens=sample.tokens[at:], start=at, block_table=sample.table, sample=(_row(sample),))
