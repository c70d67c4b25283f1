"""From the queue onto workers, and back when an attempt fails.

Owns the start and the end of an attempt and the pump that empties the queue. A lost attempt always begins anew on both
sides (the prefix caches make that cheap), keeping every accepted token: one sample goes on after its last token,
several go on only if none is past its first. Invariant: reserving, sending and recording are one step.
"""

from __future__ import annotations

from coordinator.ledger import Entry
from coordinator.live import Live, Placement
from coordinator.outcomes import drop, end, failed, pool_empty
from coordinator.placement import EmptyPool, never_fits, place, too_many_samples
from coordinator.world import World
from pdserve.messages import DropSample, Failure, Land, Prefill, Start


def pump(world: World) -> None:
    """Place whatever fits now."""

    def try_place(live: Live) -> bool | None:
        if live.tried_at == world.num_changes:
            return False
        live.tried_at = world.num_changes
        placement = place(world, live)
        if isinstance(placement, EmptyPool):
            if world.config.core.on_empty_pool != "queue":
                end(world, live, pool_empty(world, placement.message))
            live.tried_at = -1
            return None
        if placement is None:
            return False
        _start(world, live, placement)
        return True

    while world.must_pump:
        world.must_pump = False
        world.waiting.offer(try_place)


def give_up(world: World, live: Live, failure: Failure, *, culprit: str = "", counts: bool = True) -> None:
    """The present attempt is over: place the request again if that is possible and allowed, else end it."""
    placement = live.placement
    assert placement is not None, live.request
    drop(world, placement)
    live.placement = None
    live.clock.lose(world.now_ns)
    live.num_failed += counts
    if culprit and counts:
        live.avoid.add(culprit)
    world.tally.count("pdserve_attempts_failed_total", kind=failure.kind)
    reason = f"{failure.kind}: {failure.reason}"
    if live.num_failed >= world.config.core.max_attempts:
        end(world, live, failed(f"{live.num_failed} placements failed, the last one by {reason}", code="attempts"))
    elif not live.can_resume:
        message = f"{len(live.samples)} samples had already parted and cannot be continued ({reason})"
        end(world, live, failed(message, code="not_resumable", status=503, retry_after_s=1.0))
    elif failure.kind == "kv_unreadable" and world.config.core.on_kv_error == "fail":
        end(world, live, failed(f"the KV could not be read ({failure.reason})", code="kv_unreadable"))
    elif why := never_fits(world, live) or too_many_samples(world, live):
        end(world, live, failed(f"it cannot be continued after {reason}; {why}", code="not_resumable"))
    else:
        world.wait(live)


def _start(world: World, live: Live, placement: Placement) -> None:
    live.placement = live.last = placement
    live.attempt = placement.key.attempt
    live.queue_due_s = None
    live.clock.placed(world.now_ns)
    if live.attempt > 1:
        world.tally.count("pdserve_recomputed_tokens_total", placement.num_uncached)
    _reserve(world, live, placement)
    world.growth.clear()
    submit, tokens = live.submit, live.tokens_to_prefill()
    if placement.prefill:
        world.send(
            placement.prefill,
            Prefill(
                key=placement.key,
                tokens=tokens,
                num_prompt=live.num_prompt,
                sampling=submit.sampling,
                priority=submit.priority,
                salt=submit.salt,
                reader=placement.decode,
            ),
        )
    if placement.decode:
        world.send(
            placement.decode,
            Land(
                key=placement.key,
                tokens=tokens,
                num_prompt=live.num_prompt,
                sampling=submit.sampling,
                priority=submit.priority,
                salt=submit.salt,
                owner=placement.prefill,
            ),
        )
        _say_again(world, live, placement)
    world.timers.push(live)


def _reserve(world: World, live: Live, placement: Placement) -> None:
    if placement.prefill:
        entry = Entry(blocks=placement.prefill_blocks, queued_tokens=placement.num_uncached, since_s=world.now_s)
        world.ledger.reserve(placement.prefill, placement.key, entry)
    if placement.decode:
        entry = Entry(
            blocks=placement.decode_blocks,
            num_samples=len(live.samples),
            queued_tokens=0 if placement.prefill else placement.num_uncached,
            is_landing=bool(placement.prefill),
            since_s=world.now_s,
        )
        world.ledger.reserve(placement.decode, placement.key, entry)


def _say_again(world: World, live: Live, placement: Placement) -> None:
    """What the new decode worker must know of samples that got their first token in an earlier attempt."""
    if len(live.samples) == 1:
        return
    for sample in live.samples:
        if sample.is_over:
            world.send(
                placement.decode, DropSample(key=placement.key, sample=sample.index, num_generated=len(sample.tokens))
            )
        elif sample.tokens:
            start = Start(key=placement.key, sample=sample.index, position=live.num_prompt, token=sample.tokens[0])
            world.send(placement.decode, start)
