"""How a request ends: the one terminal event, its sums and its numbers (law 1).

Owns the end of a sample and of a request; why it ends is decided elsewhere. Invariant: whatever was started ends here,
exactly once, and what its workers still hold for it is dropped in the same step.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.live import Live, Placement, Sample
from coordinator.phases import Clock
from coordinator.world import World
from pdserve.messages import Drop, DropSample, Ended, SampleEnded, Submit
from pdserve.request import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    kind: str  # finished, failed, cancelled or rejected
    message: str = ""
    status: int = 200
    code: str = ""
    retry_after_s: float = 0.0


FINISHED = Outcome(kind="finished")


def failed(message: str, *, code: str, status: int = 500, retry_after_s: float = 0.0) -> Outcome:
    return Outcome(kind="failed", message=message, status=status, code=code, retry_after_s=retry_after_s)


def cancelled(reason: str) -> Outcome:
    return Outcome(kind="cancelled", message=reason, status=499, code="cancelled")


def pool_empty(world: World, message: str) -> Outcome:
    return failed(message, code="no_worker", status=503, retry_after_s=max(5.0, world.retry_after_s()))


def end_sample(world: World, live: Live, sample: Sample, reason: FinishReason, *, is_timed: bool = True) -> None:
    """No more tokens of this sample; the others go on. Not `is_timed`: its last token's time is not known."""
    sample.reason = reason
    num_generated = len(sample.tokens)
    world.forecast.observe(num_generated)
    world.make_room()
    world.send(
        live.front,
        SampleEnded(ticket=live.submit.ticket, sample=sample.index, reason=reason, num_generated=num_generated),
    )
    if num_generated > 1 and is_timed:
        world.tally.observe("pdserve_tpot_seconds", (sample.last_ns - sample.first_ns) / 1e9 / (num_generated - 1))


def drop_sample(world: World, live: Live, sample: Sample, num_generated: int | None = None) -> None:
    """Tell the decode worker that a sample is over, if others are not and it may not know; all its tokens count."""
    placement = live.placement
    if placement and placement.decode and not live.is_over:
        world.send(
            placement.decode,
            DropSample(key=placement.key, sample=sample.index, num_generated=num_generated or len(sample.tokens)),
        )


def drop(world: World, placement: Placement) -> None:
    """Its workers have no business with this attempt any more; the ledger keeps it until they say so."""
    for epoch in placement.workers:
        if world.ledger.holds(epoch, placement.key):
            world.send(epoch, Drop(key=placement.key))


def end(world: World, live: Live, outcome: Outcome) -> None:
    if live.placement:
        drop(world, live.placement)
        live.placement = None
    world.waiting.remove(live)
    world.timers.remove(live)
    world.lives.remove(live)
    world.make_room()
    _tell(world, live.front, live.submit, live.clock, outcome, live)


def refuse(world: World, front: str, submit: Submit, outcome: Outcome) -> None:
    """Ends a request that was never admitted."""
    _tell(world, front, submit, Clock(submit.received_ns), outcome, None)


def _tell(world: World, front: str, submit: Submit, clock: Clock, outcome: Outcome, live: Live | None) -> None:
    if live is None:
        clock.admitted(world.now_ns)
    phases = clock.finish(world.now_ns)
    last = live.last if live else None
    world.send(
        front,
        Ended(
            ticket=submit.ticket,
            outcome=outcome.kind,
            message=outcome.message,
            status=outcome.status,
            code=outcome.code,
            retry_after_s=outcome.retry_after_s,
            mode=last.mode if last else "",
            prefill_worker=last.prefill_name if last else "",
            decode_worker=last.decode_name if last else "",
            cached_tokens=live.num_cached if live else 0,
            attempts=live.attempt if live else 0,
            phases_ns=phases,
            transfer_ns=clock.transfer_ns,
            transfer_overlap=clock.transfer_overlap,
        ),
    )
    world.tally.count("pdserve_requests_ended_total", outcome=outcome.kind)
    if last:
        world.tally.count("pdserve_mode_total", mode=last.mode)
    if outcome.kind == "finished":
        for phase, spent_ns in phases:
            world.tally.observe("pdserve_phase_seconds", spent_ns / 1e9, phase=phase)
        if clock.transfer_ns:
            world.tally.observe("pdserve_transfer_seconds", clock.transfer_ns / 1e9)
    if clock.num_clamped:
        world.tally.count("pdserve_clamped_stamps_total", clock.num_clamped)
