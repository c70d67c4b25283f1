"""What a decode worker knows of one request: its common tokens, its samples, and the work to compute either here.

Plain state with names; every transition is in `book.py`. Invariant: a running sample has computed all its tokens but
the last one, between steps.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from decode_node.plan import COMMON, Chunk, DecodeRequest
from pdserve.messages import Key
from pdserve.request import Sampling


class State(Enum):
    """Of a sample."""

    PENDING = auto()  # its first token or the common tokens' KV are still to come
    READY = auto()  # has both: joins the batch when there is a place
    RUNNING = auto()
    EVICTED = auto()  # preempted: holds nothing, is computed again (once it has started)
    RESUMING = auto()  # being computed again
    DONE = auto()


class Common(Enum):
    """Of the blocks that pending and ready samples share."""

    ASKING = auto()  # no blocks yet: a landing that has found no room
    LANDING = auto()  # being read
    QUEUED = auto()  # no blocks yet: to be prefilled here
    PREFILLING = auto()
    COMPLETE = auto()
    GONE = auto()  # every sample has its own table, or was preempted


@dataclass(slots=True, eq=False)
class Sample:
    """One of a request's n outputs. The node reads it, only the scheduler writes."""

    request: Request
    index: int
    tokens: list[int]  # prompt and output
    digests: list[bytes]  # of leading blocks, extended when blocks are cached
    state: State = State.PENDING
    table: list[int] = field(default_factory=list)  # blocks, live; while running
    computed: int = 0  # tokens whose KV is in the table
    copy: tuple[int, int] | None = None  # to do before its first step
    num_preempted: int = 0

    @property
    def key(self) -> Key:
        return self.request.spec.key

    @property
    def sampling(self) -> Sampling:
        return self.request.spec.sampling

    @property
    def num_prompt(self) -> int:
        return self.request.spec.num_prompt

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.request.spec.num_prompt

    @property
    def holder(self) -> Hashable:
        return (self.request.spec.key, self.index)

    @property
    def age(self) -> tuple[int, int]:
        """Smaller is older."""
        return (self.request.arrival, self.index)

    @property
    def uses_common(self) -> bool:
        return self.state in (State.PENDING, State.READY)


@dataclass(slots=True, eq=False)
class Request:
    spec: DecodeRequest
    arrival: int
    common: Common
    digests: list[bytes]  # of the full blocks of spec.tokens
    samples: list[Sample] = field(default_factory=list)
    num_cached: int = 0  # of spec.tokens, from the cache

    @property
    def key(self) -> Key:
        return self.spec.key

    @property
    def has_blocks(self) -> bool:
        return self.common in (Common.LANDING, Common.PREFILLING, Common.COMPLETE)

    def waits_for_common(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.uses_common]


@dataclass(slots=True, eq=False)
class Work:
    """Tokens to compute here: the common tokens of a local request (sample is None), or a preempted sample's."""

    request: Request
    sample: Sample | None
    tokens: Sequence[int]
    digests: list[bytes]
    computed: int = 0
    num_cached: int = 0
    in_flight: Chunk | None = None

    @property
    def index(self) -> int:
        return COMMON if self.sample is None else self.sample.index

    @property
    def holder(self) -> Hashable:
        return self.request.key if self.sample is None else self.sample.holder

    @property
    def age(self) -> tuple[int, int]:
        return (self.request.arrival, self.index)
