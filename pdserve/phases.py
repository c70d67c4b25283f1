"""Names of a request's stamps and of the phases between them.

Owns the vocabulary that workers stamp with and the core sums with (`coordinator.phases`); computes nothing.
Invariant: each stamp is made once per attempt, where the thing happens, on CLOCK_MONOTONIC of that host.
"""

from __future__ import annotations

# Made by a worker, in `StepReport.stamps`. A prefill worker makes the first two; a decode worker that prefills by
# itself (local, colocated) makes them too, and none about a transfer.
PREFILL_STARTED = "prefill_started"  # the step with its first chunk begins; value: tokens skipped by the prefix cache
FIRST_TOKEN_READY = "first_token_ready"  # the first token of the attempt is sampled
TRANSFER_STARTED = "transfer_started"  # decode worker: the first read is posted; value: leading tokens it already held
TRANSFER_DONE = "transfer_done"  # decode worker: the last run is validated, also if nothing had to move; value: bytes
JOINED = "joined"  # decode worker: the last run is validated and a start has come
DECODE_STARTED = "decode_started"  # decode worker: the step that computes its first decode token begins
SECOND_TOKEN = "second_token"  # decode worker: that step has sampled

WORKER_STAMPS = (
    PREFILL_STARTED,
    FIRST_TOKEN_READY,
    TRANSFER_STARTED,
    TRANSFER_DONE,
    JOINED,
    DECODE_STARTED,
    SECOND_TOKEN,
)

# Made by the core.
FIRST_TOKEN_SENT = "first_token_sent"  # the first token was handed to the front end

# Keys of `phases_ms`, in the order of a request's life.
PHASES = (
    "admission",
    "queue",
    "prefill_wait",
    "prefill",
    "first_send",
    "handoff_tail",
    "decode_wait",
    "first_decode",
    "decode",
    "lost",
)
