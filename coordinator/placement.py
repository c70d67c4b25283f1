"""Where a request goes: which mode, what it needs, which workers have room.

Owns the arithmetic of one placement; the policy picks among what fits, and `attempts.py` carries it out.
Invariant: blocks for the prefill and for the landing are found together or not at all, so nothing placed ever waits
for memory; what streams will still grow by is counted here (forecast) and never reserved.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.live import Live, Placement
from coordinator.router import Candidate, Demand
from coordinator.workers import Worker
from coordinator.world import World
from pdserve.layout import KVLayout
from pdserve.messages import Key
from pdserve.prefix import max_cached_tokens
from pdserve.request import blocks_at_end


@dataclass(frozen=True, slots=True, kw_only=True)
class EmptyPool:
    """No worker of this role takes requests."""

    role: str

    @property
    def message(self) -> str:
        return f"no {self.role} worker is ready; they are starting, or were lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Road:
    mode: str
    has_prefill: bool
    has_decode: bool


def decode_blocks(layout: KVLayout, num_tokens: int, num_samples: int) -> int:
    """To land `num_tokens` and decode one more in each sample: full blocks are shared, the partial one is copied."""
    shared = num_tokens // layout.block_size
    return shared + num_samples * (layout.blocks_for(num_tokens + 1) - shared)


def never_fits(world: World, live: Live) -> str | None:
    """Why no live pool, even empty, could take the request; None if one could, or if there is none to ask."""
    layout, sampling = world.workers.layout, live.submit.sampling
    road = choose_road(world, live)
    if layout is None or isinstance(road, EmptyPool):
        return None
    asked = f"a prompt of {live.num_prompt} tokens and max_tokens {sampling.max_tokens}"
    if road.has_prefill:
        needed, largest = layout.blocks_for(live.num_to_prefill), world.workers.num_blocks("prefill")
        if needed > largest:
            return f"{asked}: prefill needs {needed} KV blocks, the largest prefill pool has {largest}"
    if road.has_decode:
        whole = layout.blocks_for(live.num_prompt + sampling.max_tokens)
        needed = max(whole, blocks_at_end(sampling, live.num_prompt, live.num_prompt, layout.block_size))
        largest = world.workers.num_blocks("decode")
        if needed > largest:
            return f"{asked}, n {sampling.n}: decode needs {needed} KV blocks, the largest decode pool has {largest}"
    return None


def too_many_samples(world: World, live: Live) -> str | None:
    """Why no live decode worker could run all samples at once."""
    most = max((worker.hello.max_running for worker in world.workers.live("decode")), default=0)
    if most and live.needs_decode and live.submit.sampling.n > most:
        return f"n is {live.submit.sampling.n}, a decode worker runs at most {most} samples"
    return None


def choose_road(world: World, live: Live) -> Road | EmptyPool:
    config = world.config
    decodes = world.workers.routable("decode")
    if config.is_colocated:
        mode = "colocated"
    elif config.core.disaggregate == "never" or (
        config.core.disaggregate == "auto" and _is_short(world, live, decodes)
    ):
        mode = "local"
    elif world.workers.routable("prefill"):
        mode = "disaggregated"
    elif config.core.on_empty_pool == "local":
        mode = "local"
    else:
        return EmptyPool(role="prefill")
    has_prefill = mode == "disaggregated"
    has_decode = live.needs_decode or not has_prefill
    if has_decode and not decodes:
        return EmptyPool(role="decode")
    return Road(mode=mode, has_prefill=has_prefill, has_decode=has_decode)


def place(world: World, live: Live) -> Placement | EmptyPool | None:
    """Where the request fits now; None: nowhere."""
    layout = world.workers.layout
    road = choose_road(world, live)
    if isinstance(road, EmptyPool) or layout is None:
        return road if isinstance(road, EmptyPool) else EmptyPool(role="decode")
    at_prefill = layout.blocks_for(live.num_to_prefill) if road.has_prefill else 0
    at_decode = decode_blocks(layout, live.num_to_prefill, len(live.samples)) if road.has_decode else 0
    prefills = _with_room(world, live, "prefill", at_prefill) if road.has_prefill else []
    decodes = _with_room(world, live, "decode", at_decode, is_landing=road.has_prefill) if road.has_decode else []
    if (road.has_prefill and not prefills) or (road.has_decode and not decodes):
        return None
    demand = Demand(
        num_tokens=live.num_to_prefill,
        num_samples=len(live.running),
        token_bytes=layout.token_bytes,
        chunk_tokens=world.config.chunk_tokens,
        link_bytes_per_s=world.config.link_bytes_per_s,
    )
    prefill, decode = world.policy.choose(demand, prefills, decodes)
    computing = prefill or decode
    assert computing is not None
    return Placement(
        key=Key(request=live.request, attempt=live.attempt + 1),
        mode=road.mode,
        prefill=prefill.epoch if prefill else "",
        decode=decode.epoch if decode else "",
        prefill_name=_name(world, prefill),
        decode_name=_name(world, decode),
        num_tokens=live.num_to_prefill,
        num_uncached=max(1, live.num_to_prefill - computing.cached_tokens),
        prefill_blocks=at_prefill,
        decode_blocks=at_decode,
    )


def _growth_on(world: World, epoch: str) -> float:
    """Blocks that the streams on a decode worker are expected to still grow by, in all."""
    if epoch not in world.growth:
        layout = world.workers.layout
        assert layout is not None
        lives = (world.lives.placed(key) for key in world.ledger.book(epoch).entries)
        world.growth[epoch] = sum(_growth(world, live, layout) for live in lives if live is not None)
    return world.growth[epoch]


def _growth(world: World, live: Live, layout: KVLayout) -> float:
    most = live.submit.sampling.max_tokens
    remaining = (world.forecast.mean_to_come(len(sample.tokens), most) - 1 for sample in live.running)
    return sum(max(0.0, tokens) for tokens in remaining) / layout.block_size


def _is_short(world: World, live: Live, decodes: list[Worker]) -> bool:
    cached = max((_num_cached(world, live, worker.epoch) for worker in decodes), default=0)
    return bool(decodes) and live.num_to_prefill - cached < world.config.core.local_prefill_tokens


def _num_cached(world: World, live: Live, epoch: str) -> int:
    layout = world.workers.layout
    if layout is None or not live.digests:
        return 0
    most = max_cached_tokens(live.num_to_prefill, layout.block_size)
    return min(most, world.index.num_leading(epoch, live.digests) * layout.block_size)


def _with_room(world: World, live: Live, role: str, blocks: int, *, is_landing: bool = False) -> list[Candidate]:
    """Workers that can take it now; those that have failed this request only if there are no others."""
    workers = world.workers.routable(role)
    fresh = [worker for worker in workers if worker.epoch not in live.avoid] or workers
    found = []
    for worker in fresh:
        if role == "decode" and not _can_decode(world, live, worker, blocks, is_landing=is_landing):
            continue
        candidate = _candidate(world, live, worker)
        if is_landing or _can_prefill(world, live, candidate, blocks):
            found.append(candidate)
    return found


def _can_prefill(world: World, live: Live, candidate: Candidate, blocks: int) -> bool:
    book = world.ledger.book(candidate.epoch)
    uncached = live.num_to_prefill - candidate.cached_tokens
    is_late_enough = book.queued_tokens == 0 or book.queued_tokens + uncached <= world.config.max_assigned_tokens
    return is_late_enough and blocks <= book.free_blocks


def _can_decode(world: World, live: Live, worker: Worker, blocks: int, *, is_landing: bool) -> bool:
    book = world.ledger.book(worker.epoch)
    if blocks > book.free_blocks or book.num_samples + len(live.samples) > worker.hello.max_running:
        return False
    if not book.entries:
        return True
    landing = book.landing_blocks + blocks
    if is_landing and book.landing_blocks and landing > world.config.landing_share * book.num_blocks:
        return False
    peak = book.blocks + blocks + _growth_on(world, worker.epoch) + _growth(world, live, worker.info.layout)
    return peak <= book.num_blocks


def _candidate(world: World, live: Live, worker: Worker) -> Candidate:
    book = world.ledger.book(worker.epoch)
    return Candidate(
        epoch=worker.epoch,
        cached_tokens=_num_cached(world, live, worker.epoch),
        queued_tokens=book.queued_tokens,
        num_samples=book.num_samples,
        used_share=book.used_share,
        prefill_rate=worker.prefill_rate,
        sample_s=worker.sample_s,
    )


def _name(world: World, candidate: Candidate | None) -> str:
    worker = world.workers.get(candidate.epoch) if candidate else None
    return worker.name if worker else ""
