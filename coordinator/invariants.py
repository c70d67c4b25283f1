"""What must hold between any two events.

Owns the proof, not the state. Raises AssertionError with the numbers; test fixtures call it after every step.
Invariant: every request is in exactly one place, and what was started has ended or is live.
"""

from __future__ import annotations

from coordinator.live import Live
from coordinator.world import World
from pdserve.messages import Key


def check(world: World) -> None:
    world.ledger.check()
    world.waiting.check()
    started = world.tally.value("pdserve_requests_started_total")
    ended = world.tally.value("pdserve_requests_ended_total")
    assert started == ended + len(world.lives), (started, ended, len(world.lives))
    for live in world.waiting:
        assert world.lives.ticket(live.front, live.submit.ticket) is live, live.request
    for live in world.lives:
        _check_live(world, live)


def _check_live(world: World, live: Live) -> None:
    is_waiting, is_placed = live in world.waiting, live.placement is not None
    assert is_waiting != is_placed, (live.request, is_waiting, is_placed)
    assert is_waiting == (live.queue_due_s is not None), (live.request, live.queue_due_s)
    assert not live.is_over, live.request
    most = live.submit.sampling.max_tokens
    for sample in live.samples:
        assert len(sample.tokens) <= most, (live.request, sample.index, len(sample.tokens), most)
    if live.placement is not None:
        key, decode = live.placement.key, live.placement.decode
        assert key == Key(request=live.request, attempt=live.attempt), (key, live.attempt)
        assert all(world.workers.get(epoch) for epoch in live.placement.workers if world.ledger.holds(epoch, key)), key
        assert not decode or world.ledger.holds(decode, key), (key, decode)
