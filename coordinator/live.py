"""One request while it lives: what was asked, what was accepted, where it is placed.

Owns the record and questions about it; changes nothing outside. Invariant: a request waits, or has a placement, never
both; a sample's accepted tokens are consecutive and are never changed, only cut at the stop the front end found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from coordinator.phases import Clock
from pdserve.messages import Key, Submit
from pdserve.request import FinishReason


@dataclass(slots=True, kw_only=True)
class Sample:
    index: int
    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None  # set: it is over
    first_ns: int = 0
    last_ns: int = 0

    @property
    def is_over(self) -> bool:
        return self.reason is not None


@dataclass(slots=True, kw_only=True)
class Placement:
    """One attempt, on its workers."""

    key: Key
    mode: str  # disaggregated, local or colocated
    prefill: str  # epoch; empty: the decode worker prefills
    decode: str  # epoch; empty: nothing to decode
    prefill_name: str
    decode_name: str
    num_tokens: int  # to prefill: prompt, and what was generated before
    num_uncached: int  # of those, as far as the core knew
    num_cached: int = 0  # of those, as its worker found
    prefill_blocks: int
    decode_blocks: int  # at landing
    is_prefilled: bool = False  # the token after `num_tokens` was sampled
    is_landed: bool = False  # all KV is where it decodes
    landing_due_s: float | None = None

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(epoch for epoch in (self.prefill, self.decode) if epoch)


@dataclass(slots=True, kw_only=True, eq=False)
class Live:
    request: str
    front: str
    submit: Submit
    arrival: int
    clock: Clock
    due_s: float  # it fails then, whatever it is doing
    digests: list[bytes]  # of the prompt's full blocks
    samples: list[Sample]
    placement: Placement | None = None
    last: Placement | None = None  # the latest one, over or not
    queue_due_s: float | None = None
    attempt: int = 0  # placements so far
    num_failed: int = 0  # of them, those that count
    num_bypassed: int = 0
    num_cached: int = 0
    tried_at: int = -1  # `World.num_changes` when it last did not fit
    avoid: set[str] = field(default_factory=set)  # epochs that failed it

    @property
    def order(self) -> tuple[int, int]:
        return (self.submit.priority, self.arrival)

    @property
    def num_prompt(self) -> int:
        return len(self.submit.prompt)

    @property
    def is_over(self) -> bool:
        return all(sample.is_over for sample in self.samples)

    @property
    def running(self) -> list[Sample]:
        return [sample for sample in self.samples if not sample.is_over]

    @property
    def can_resume(self) -> bool:
        """Another attempt can go on where this one stopped: with several samples, only before they part."""
        return len(self.samples) == 1 or all(len(sample.tokens) <= 1 for sample in self.samples)

    @property
    def num_to_prefill(self) -> int:
        return self.num_prompt + (len(self.samples[0].tokens) if len(self.samples) == 1 else 0)

    @property
    def needs_decode(self) -> bool:
        """The next attempt's first token is not the last one everywhere."""
        generated = len(self.samples[0].tokens) if len(self.samples) == 1 else 0
        return self.submit.sampling.max_tokens - generated > 1

    def tokens_to_prefill(self) -> tuple[int, ...]:
        if len(self.samples) > 1:
            return self.submit.prompt
        return self.submit.prompt + tuple(self.samples[0].tokens)

    def next_due_s(self) -> float:
        due = [self.due_s]
        if self.queue_due_s is not None:
            due.append(self.queue_due_s)
        if self.placement and self.placement.landing_due_s is not None:
            due.append(self.placement.landing_due_s)
        return min(due)

    @property
    def state(self) -> str:
        if self.placement is None:
            return "queued"
        if not self.placement.is_prefilled:
            return "prefill"
        return "decode" if self.placement.is_landed else "handoff"


class Lives:
    """All live requests, by id and by the front end's ticket."""

    def __init__(self) -> None:
        self._by_id: dict[str, Live] = {}
        self._by_ticket: dict[tuple[str, int], Live] = {}
        self._per_tenant: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Live]:
        return iter(self._by_id.values())

    def add(self, live: Live) -> None:
        self._by_id[live.request] = live
        self._by_ticket[live.front, live.submit.ticket] = live
        self._per_tenant[live.submit.tenant] = self.num_of_tenant(live.submit.tenant) + 1

    def remove(self, live: Live) -> None:
        del self._by_id[live.request]
        del self._by_ticket[live.front, live.submit.ticket]
        self._per_tenant[live.submit.tenant] -= 1
        if not self._per_tenant[live.submit.tenant]:
            del self._per_tenant[live.submit.tenant]

    def num_of_tenant(self, tenant: str) -> int:
        return self._per_tenant.get(tenant, 0)

    def ticket(self, front: str, ticket: int) -> Live | None:
        return self._by_ticket.get((front, ticket))

    def of_front(self, front: str) -> list[Live]:
        return [live for live in self._by_id.values() if live.front == front]

    def placed(self, key: Key) -> Live | None:
        """The request whose present placement this is."""
        live = self._by_id.get(key.request)
        return live if live is not None and live.placement is not None and live.placement.key == key else None
