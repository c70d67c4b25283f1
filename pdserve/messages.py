"""Everything that crosses a process boundary, as plain data.

Owns the message types, their tags and the byte format; moves no bytes. Every message is a frozen dataclass, encoded as
a msgpack array [tag, field, ...] in field order (`codec.py`). Invariant: decoding checks every type, so a receiver
never meets a malformed message: it gets a `MalformedError` and drops it. Nothing is ever unpickled.

Ids: `request` is made by the core; `attempt` counts its placements from 1; `epoch` names one life of one process.
Positions count tokens of prompt + output from 0. Times are nanoseconds of CLOCK_MONOTONIC of the sender's host.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.codec import Registry
from pdserve.layout import KVLayout
from pdserve.request import Sampling

PROTOCOL_VERSION = 1

# --- nouns -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One placement of one request; in every message between workers and core (law 7)."""

    request: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOut:
    """One sampled token."""

    key: Key
    sample: int
    position: int
    token: int
    logprob: float | None  # of the token itself, natural log; None unless asked for
    top: tuple[tuple[int, float], ...]  # alternatives, most likely first


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """Something happened to a request at a time; names as in `pdserve.phases`."""

    key: Key
    name: str
    time_ns: int
    value: int = 0  # cached tokens, bytes: whatever the name says


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Consecutive published tokens: they start at a block boundary and fill `blocks` but perhaps the last one."""

    first_position: int
    num_tokens: int
    blocks: tuple[int, ...]
    generations: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOffer:
    """How a pool can be read: what the owner offers, in its order of preference."""

    kind: str  # shm or tcp
    address: str  # shm: path of the Unix socket that hands out the header; tcp: ZeroMQ endpoint of the block server


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerInfo:
    """A live worker as others need to know it."""

    name: str
    role: str  # prefill or decode
    epoch: str
    endpoint: str  # ZeroMQ endpoint of its peer socket
    layout: KVLayout
    num_blocks: int
    links: tuple[LinkOffer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Blocks of a pool by state; they sum to the pool less the null block."""

    free: int
    cached: int
    held: int
    landing: int
    draining: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A counter's total or a gauge's value on a worker, exported by the coordinator with a `worker` label."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


# --- front end <-> core ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontHello:
    """Front end -> core: a front end starts talking."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Front end -> core: a request, completely validated. `ticket` is the front end's own number for it."""

    ticket: int
    prompt: tuple[int, ...]
    sampling: Sampling
    stop: tuple[str, ...]
    priority: int  # lower is sooner
    tenant: str
    salt: str
    received_ns: int
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandon:
    """Front end -> core: the client left, or the stream failed."""

    ticket: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopFound:
    """Front end -> core: a stop string was completed by the sample's `num_generated`-th token."""

    ticket: int
    sample: int
    num_generated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Core -> front end: accepted tokens of one sample, the first being its `first`-th generated token (from 0)."""

    ticket: int
    sample: int
    first: int
    tokens: tuple[TokenText, ...]
    mode: str = ""  # of the request's present placement, as in `Ended`


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenText:
    """A token as the front end needs it."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleEnded:
    """Core -> front end: no more tokens of this sample."""

    ticket: int
    sample: int
    reason: str  # stop or length
    num_generated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Core -> front end: the one terminal event of a request (law 1)."""

    ticket: int
    outcome: str  # finished, failed, cancelled or rejected
    message: str  # why, unless finished
    status: int  # HTTP status, unless finished
    code: str
    retry_after_s: float  # 0: none
    mode: str  # disaggregated, local or colocated; empty before placement
    prefill_worker: str
    decode_worker: str
    cached_tokens: int
    attempts: int
    phases_ns: tuple[tuple[str, int], ...]  # the keys of phases_ms in the HTTP contract
    transfer_ns: int
    transfer_overlap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Front end or supervisor -> core: would a new request be served? The answer went through the engine loops."""

    nonce: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReply:
    nonce: int
    is_ready: bool
    detail: str  # JSON: state of each pool, and why not ready


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Front end or supervisor -> core: the state to show. `what` is pools, requests or metrics."""

    nonce: int
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryReply:
    nonce: int
    body: str  # JSON for pools and requests, Prometheus text for metrics


# --- supervisor <-> core ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorHello:
    """Supervisor -> core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainWorker:
    """Supervisor -> core: take a worker out of routing; when it holds nothing, tell it to leave."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGone:
    """Supervisor -> core: the process has ended."""

    worker: str
    epoch: str  # empty: whatever epoch it had
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """Core -> supervisor: a worker is now ready, suspect (kill it after the hang timeout), draining or drained."""

    worker: str
    epoch: str
    state: str
    reason: str


# --- core <-> workers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHello:
    """Worker -> core: registration, first message of an epoch."""

    info: PeerInfo
    pid: int
    host: str
    device: str
    model: str  # served model's name, for messages
    max_model_len: int
    max_running: int
    prefill_tokens_per_s: float  # measured at start; the router's first guess
    weight_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """Core -> worker: every live worker; who is missing is dead, and its memory must be let go."""

    peers: tuple[PeerInfo, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Core -> prefill worker: compute `tokens`, sample the next token of each sample, keep the KV for the reader."""

    key: Key
    tokens: tuple[int, ...]  # prompt, then tokens generated before (a resumed stream; then sampling.n is 1)
    num_prompt: int
    sampling: Sampling
    priority: int
    salt: str
    reader: str  # epoch of the decode worker that will read; empty: nobody will


@dataclass(frozen=True, slots=True, kw_only=True)
class Land:
    """Core -> decode worker: take a request. With `owner`, read its KV from there; without, prefill it here."""

    key: Key
    tokens: tuple[int, ...]
    num_prompt: int
    sampling: Sampling
    priority: int
    salt: str
    owner: str  # epoch of the prefill worker; empty: local or colocated


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Core -> decode worker: `token` at `position` is accepted; the sample may decode from there."""

    key: Key
    sample: int
    position: int
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Core -> worker: the attempt has no business here any more. Answered by `Released` when its blocks are free."""

    key: Key


@dataclass(frozen=True, slots=True, kw_only=True)
class DropSample:
    """Core -> decode worker: one sample is over after `num_generated` tokens; what lies beyond is never cached."""

    key: Key
    sample: int
    num_generated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """Core -> worker: answered from the engine loop."""

    nonce: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    nonce: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Core -> worker: drained; exit 0."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Worker -> core: everything one step brought: tokens and stamps."""

    tokens: tuple[TokenOut, ...]
    stamps: tuple[Stamp, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """Worker -> core: no block is held, landing or draining for this attempt any more."""

    key: Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Worker -> core: the attempt cannot go on here. The core decides what that means."""

    key: Key
    kind: str  # kv_unreadable, owner_lost, yielded, handoff_timeout, refused, internal
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEvents:
    """Worker -> core: what entered and left the prefix cache, in order. `first` is a running number; a gap resyncs."""

    first: int
    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]
    is_snapshot: bool  # stored is everything there is


@dataclass(frozen=True, slots=True, kw_only=True)
class ResyncCache:
    """Core -> worker: send a snapshot."""

    nonce: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Worker's heartbeat thread -> core, unacknowledged, on a socket of its own.

    `step` counts loop turns, `deadline_ns` is when the current one must be over; `held` and `leases` are reconciled.
    """

    worker: str
    epoch: str
    sent_ns: int
    step: int
    deadline_ns: int
    phase: str  # loading, warming, serving
    held: tuple[Key, ...]
    leases: tuple[Key, ...]
    counts: Counts
    num_running: int
    metrics: tuple[Metric, ...]


# --- decode worker <-> prefill worker --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Owner -> reader: these runs are complete on the device and leased. `is_last`: the whole prompt is out."""

    key: Key
    runs: tuple[Run, ...]
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    """Reader -> owner: one message for all leases it still needs."""

    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseLease:
    """Reader -> owner: all of it is validated, or no longer wanted. Removes only this reader's lease."""

    key: Key


REGISTRY = Registry(
    version=PROTOCOL_VERSION,
    tags={
        1: FrontHello, 2: Submit, 3: Abandon, 4: StopFound, 6: Output, 7: SampleEnded, 8: Ended,
        9: Probe, 10: ProbeReply, 11: Query, 12: QueryReply,
        20: SupervisorHello, 21: DrainWorker, 22: WorkerGone, 23: WorkerState,
        30: WorkerHello, 33: Roster, 34: Prefill, 35: Land, 36: Start, 37: Drop, 38: DropSample,
        39: Ping, 40: Pong, 41: Leave, 42: StepReport, 43: Released, 44: Failure, 45: CacheEvents, 46: ResyncCache,
        47: Heartbeat,
        60: Published, 61: Renew, 62: ReleaseLease,
    },
)  # fmt: skip

encode = REGISTRY.encode
decode = REGISTRY.decode
