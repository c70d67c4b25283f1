"""What operators and front ends are shown: readiness, pools, requests, metrics.

Owns the shapes of these answers; changes nothing. Invariant: a view is computed from the world as it stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coordinator.live import Live
from coordinator.tally import Labels, Row, text
from coordinator.workers import Worker
from coordinator.world import World
from pdserve.config import ROLES

# exported, if without a value, before the first of their kind has happened
DECLARED = (
    ("pdserve_requests_started_total", "counter"),
    ("pdserve_requests_ended_total", "counter"),
    ("pdserve_mode_total", "counter"),
    ("pdserve_transfers", "gauge"),
    ("pdserve_transfer_bytes_total", "counter"),
    ("pdserve_reads_rejected_total", "counter"),
    ("pdserve_discarded_tokens_total", "counter"),
    ("pdserve_messages_ignored_total", "counter"),
    ("pdserve_phase_seconds", "histogram"),
    ("pdserve_transfer_seconds", "histogram"),
    ("pdserve_ttft_seconds", "histogram"),
    ("pdserve_itl_seconds", "histogram"),
    ("pdserve_tpot_seconds", "histogram"),
)


def readiness(world: World) -> tuple[bool, dict[str, Any]]:
    """Whether a new request would be served under the present flags, and each pool's state."""
    why = ""
    if not world.workers.routable("decode"):
        why = "no decode worker is ready"
    elif _needs_prefill(world) and not world.workers.routable("prefill"):
        why = "no prefill worker is ready"
    elif world.waiting.num_samples >= world.config.core.max_queued_requests:
        why = "the queue is full"
    pools_ready = {role: bool(world.workers.routable(role)) for role in ROLES}
    detail = {
        "ready": not why,
        "reason": why,
        "queued_requests": len(world.waiting),
        "pools": {role: {"ready": pools_ready[role], "workers": _states(world, role)} for role in ROLES},
    }
    return not why, detail


def probe_targets(world: World) -> list[str]:
    """One routable worker of each role that a new request needs: the one that was heard from last."""
    roles = ["decode", *(["prefill"] if _needs_prefill(world) else [])]
    found = [max(world.workers.routable(role), key=_last_heard_ns, default=None) for role in roles]
    return [worker.epoch for worker in found if worker is not None]


def _last_heard_ns(worker: Worker) -> int:
    return worker.heartbeat.sent_ns if worker.heartbeat else 0


def pools(world: World) -> dict[str, Any]:
    return {
        role: {
            "num_ready": len(world.workers.routable(role)),
            "workers": [_worker(world, each) for each in world.workers.live(role)],
        }
        for role in ROLES
    }


def requests(world: World) -> list[dict[str, Any]]:
    return [_request(world, live) for live in world.lives]


def metrics(world: World, ignored: Mapping[str, int]) -> str:
    """Everything in the names of the HTTP contract: the core's own, and what workers sent with their heartbeats."""
    families: dict[str, tuple[str, list[Row]]] = {name: (kind, []) for name, kind in DECLARED}
    families.update((name, (kind, rows)) for name, kind, rows in world.tally.families())

    def add(name: str, kind: str, labels: Labels, value: float) -> None:
        rows: list[Row] = families.setdefault(name, (kind, []))[1]
        rows.append((name, labels, value))

    for reason, number in ignored.items():
        add("pdserve_messages_ignored_total", "counter", (("reason", reason),), number)
    states = dict.fromkeys(("queued", "prefill", "handoff", "decode"), 0)
    for live in world.lives:
        states[live.state] += 1
    for state, number in states.items():
        add("pdserve_requests", "gauge", (("state", state),), number)
    for worker in world.workers.live():
        labels = (("pool", worker.role), ("worker", worker.name))
        if beat := worker.heartbeat:
            for state in ("free", "cached", "held", "landing", "draining"):
                add("pdserve_kv_blocks", "gauge", (*labels, ("state", state)), getattr(beat.counts, state))
            add("pdserve_leases", "gauge", (("worker", worker.name),), len(beat.leases))
            for metric in beat.metrics:
                family, kind = _family(metric.name)
                families.setdefault(family, (kind, []))[1].append(
                    (metric.name, (*metric.labels, ("worker", worker.name)), metric.value)
                )
        add("pdserve_reserved_blocks", "gauge", labels, world.ledger.book(worker.epoch).blocks)
    return text((name, kind, rows) for name, (kind, rows) in sorted(families.items()))


def _family(name: str) -> tuple[str, str]:
    """The metric that a worker's row belongs to, and its type."""
    if name.endswith("_total"):
        return name, "counter"
    for part in ("_sum", "_count"):
        if name.endswith(part):
            return name.removesuffix(part), "summary"
    return name, "gauge"


def _needs_prefill(world: World) -> bool:
    config = world.config
    return not (config.is_colocated or config.core.disaggregate == "never" or config.core.on_empty_pool == "local")


def _states(world: World, role: str) -> dict[str, str]:
    return {worker.name: worker.state for worker in world.workers.live(role)}


def _worker(world: World, worker: Worker) -> dict[str, Any]:
    book, beat = world.ledger.book(worker.epoch), worker.heartbeat
    counts = beat.counts if beat else None
    return {
        "name": worker.name,
        "role": worker.role,
        "state": worker.state,
        "epoch": worker.epoch,
        "pid": worker.hello.pid,
        "host": worker.hello.host,
        "device": worker.hello.device,
        "model": worker.hello.model,
        "weight_bytes": worker.hello.weight_bytes,
        "links": [link.kind for link in worker.info.links],
        "block_size": worker.info.layout.block_size,
        "num_blocks": worker.num_blocks,
        "blocks": {state: getattr(counts, state) for state in ("free", "cached", "held", "landing", "draining")}
        if counts
        else {},
        "reserved_blocks": book.blocks,
        "num_placements": len(book.entries),
        "num_samples": book.num_samples,
        "num_running": beat.num_running if beat else 0,
        "queued_tokens": book.queued_tokens,
        "prefill_tokens_per_s": round(worker.prefill_rate, 1),
        "cached_digests": world.index.size(worker.epoch),
    }


def _request(world: World, live: Live) -> dict[str, Any]:
    last = live.last
    return {
        "request": live.request,
        "state": live.state,
        "age_s": max(0.0, round((world.now_ns - live.submit.received_ns) / 1e9, 3)),
        "priority": live.submit.priority,
        "num_prompt": live.num_prompt,
        "num_generated": [len(sample.tokens) for sample in live.samples],
        "max_tokens": live.submit.sampling.max_tokens,
        "attempts": live.attempt,
        "num_bypassed": live.num_bypassed,
        "mode": last.mode if last else "",
        "prefill_worker": last.prefill_name if last else "",
        "decode_worker": last.decode_name if last else "",
        "stamps_ns": live.clock.stamps(),
    }
