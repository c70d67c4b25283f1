"""Whether a new request may wait at all.

Owns the bounds at the door (law 12): what can never be served is refused with both counts, what could not be served in
time is refused early. Invariant: a request that passes is queued; nothing is refused for a reason found after that
except time, a worker's failure or an empty pool.
"""

from __future__ import annotations

from coordinator.live import Live
from coordinator.outcomes import Outcome, pool_empty
from coordinator.placement import EmptyPool, choose_road, never_fits, too_many_samples
from coordinator.world import World


def refusal(world: World, live: Live) -> Outcome | None:
    """None: admitted. `live` is not in the queue yet."""
    if why := _too_long(world, live) or never_fits(world, live):
        return Outcome(kind="rejected", message=why, status=400, code="context_length_exceeded")
    if why := too_many_samples(world, live):
        return Outcome(kind="rejected", message=why, status=400, code="invalid_value")
    if why := _too_many(world, live):
        return Outcome(kind="rejected", message=why, status=429, code="overloaded", retry_after_s=world.retry_after_s())
    road = choose_road(world, live)
    if isinstance(road, EmptyPool) and world.config.core.on_empty_pool != "queue":
        return pool_empty(world, road.message)
    wait_s = world.predicted_wait_s()
    if wait_s > live.due_s - world.now_s:
        message = f"the request has {max(0.0, live.due_s - world.now_s):.1f} s, the queue is about {wait_s:.0f} s long"
        return Outcome(
            kind="rejected", message=message, status=503, code="overloaded", retry_after_s=world.retry_after_s()
        )
    return None


def _too_long(world: World, live: Live) -> str | None:
    limit = world.config.max_model_len or world.workers.max_model_len
    most = live.submit.sampling.max_tokens
    if limit and live.num_prompt + most > limit:
        return f"the context is {limit} tokens: {live.num_prompt} in the prompt and max_tokens {most} are too many"
    return None


def _too_many(world: World, live: Live) -> str | None:
    config, waiting = world.config, world.waiting
    if waiting.num_samples + live.submit.sampling.n > config.core.max_queued_requests:
        return f"{waiting.num_samples} requests are waiting, the limit is {config.core.max_queued_requests}"
    tokens = waiting.num_tokens + live.num_prompt
    if len(waiting) and tokens > config.core.max_queued_tokens:
        return f"{tokens} prompt tokens would be waiting, the limit is {config.core.max_queued_tokens}"
    of_tenant = world.lives.num_of_tenant(live.submit.tenant)
    if config.max_requests_per_tenant and of_tenant >= config.max_requests_per_tenant:
        return f"tenant {live.submit.tenant!r} has {of_tenant} live requests, its limit"
    return None
