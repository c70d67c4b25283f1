"""What the core promises and where it stops: every bound of the coordinator in one frozen record.

Owns the numbers and their defaults; reads no file and no flag (config.py does). Invariant: a `Limits` is consistent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_queued_requests: int = 256  # beyond: 429
    max_queued_tokens: int = 262_144  # prompt tokens; beyond: 429, but one request always may wait
    max_requests_per_tenant: int = 0  # live ones; beyond: 429; 0 is no bound
    max_model_len: int = 0  # prompt + output; 0: the smallest that a live worker states
    request_timeout_s: float = 600.0  # beyond: 504
    queue_timeout_s: float = 30.0  # beyond: 503
    handoff_wait_s: float = 10.0  # beyond: placed again
    max_attempts: int = 3  # beyond: failed with the last reason
    max_bypasses: int = 16  # beyond: a request that does not fit lets nobody pass
    landing_share: float = 0.25  # of a decode pool, for KV that is still arriving
    max_batched_tokens: int = 2048  # of one step; a worker is given at most two such batches to prefill
    chunk_tokens: int = 512  # of one request in one step: what is left to move when the prompt is done
    local_prefill_tokens: int = 64  # with `auto`: prompts with fewer uncached tokens are prefilled where they decode
    disaggregate: Literal["always", "auto", "never"] = "always"
    on_empty_pool: Literal["fail", "queue", "local"] = "fail"
    on_kv_error: Literal["retry", "fail"] = "retry"
    is_colocated: bool = False  # no prefill workers by design
    router: Literal["round_robin", "least_load", "power_of_two", "prefix_aware"] = "prefix_aware"
    link_bytes_per_s: float = 1e9  # the router's guess of what a hand-off reaches
    lease_ttl_s: float = 20.0
    heartbeat_timeout_s: float = 2.0  # silent for longer: lost
    hang_timeout_s: float = 10.0  # the supervisor kills a lost worker after this
    seed: int = 0  # of the router's tie breaks

    @property
    def max_assigned_tokens(self) -> int:
        """Prompt tokens that may wait on a worker (late binding: everything else waits in the core's one queue)."""
        return 2 * self.max_batched_tokens
