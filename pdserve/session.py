"""Exactly-once, in-order delivery between two lives of two processes, without a socket or a clock.

Owns sequence numbers, what is unacknowledged, and when to send it again; moves no bytes. A session belongs to one pair
of epochs and dies with either. Invariant: payloads are delivered in the order sent, each once, however often frames
are lost, repeated or reordered; at most `window` payloads and `window_bytes` bytes wait for an acknowledgement.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice

RESEND_AFTER_S = 1.0
RETRY_BLOCKED_S = 0.02
ACK_AFTER_S = 0.05
ACK_EVERY = 64
RESEND_AT_MOST = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What travels: `sequence` 0 carries only the acknowledgement, cumulative."""

    sequence: int
    acknowledged: int
    payload: bytes


class Session:
    def __init__(self, *, window: int = 8192, window_bytes: int = 64 * 1024 * 1024) -> None:
        self._window = window
        self._window_bytes = window_bytes
        self._unacked: deque[tuple[int, bytes]] = deque()
        self._unacked_bytes = 0
        self._next_sequence = 1
        self._delivered = 0
        self._owed = 0  # frames received since the last acknowledgement left
        self._owed_since_s: float | None = None
        self._resend_at_s: float | None = None
        self._resent_upto = 0  # while it recovers: the last sequence number sent again

    @property
    def num_unacked(self) -> int:
        return len(self._unacked)

    def can_send(self, num_bytes: int = 0) -> bool:
        return len(self._unacked) < self._window and (
            not self._unacked or self._unacked_bytes + num_bytes <= self._window_bytes
        )

    def send(self, payload: bytes, now_s: float) -> Frame | None:
        """Number and keep `payload`; None when the window is full, and nothing is kept."""
        if not self.can_send(len(payload)):
            return None
        self._unacked.append((self._next_sequence, payload))
        self._unacked_bytes += len(payload)
        self._next_sequence += 1
        if self._resend_at_s is None:
            self._resend_at_s = now_s + RESEND_AFTER_S
        return self._frame(self._next_sequence - 1, payload)

    def blocked(self, now_s: float) -> None:
        """The socket took no frame: try all again soon."""
        if self._unacked:
            self._resend_at_s = min(self._resend_at_s or now_s, now_s) + RETRY_BLOCKED_S

    def receive(self, frame: Frame, now_s: float) -> bytes | None:
        """The payload to deliver now, or None: a bare acknowledgement, a repeat, or one from beyond a gap."""
        self._acknowledge(frame.acknowledged, now_s)
        if frame.sequence == 0:
            return None
        if self._owed_since_s is None:
            self._owed_since_s = now_s
        if frame.sequence != self._delivered + 1:
            return None
        self._owed += 1
        self._delivered = frame.sequence
        return frame.payload

    def due(self, now_s: float) -> list[Frame]:
        """Frames to send now: repeats of what was not acknowledged in time, or an acknowledgement owed."""
        if self._resend_at_s is not None and now_s >= self._resend_at_s:
            self._resend_at_s = now_s + RESEND_AFTER_S
            again = [self._frame(seq, payload) for seq, payload in islice(self._unacked, RESEND_AT_MOST)]
            self._resent_upto = again[-1].sequence if again else 0
            return again
        if self._owed_since_s is not None and (self._owed >= ACK_EVERY or now_s >= self._owed_since_s + ACK_AFTER_S):
            return [self.acknowledgement()]
        return []

    def acknowledgement(self) -> Frame:
        return self._frame(0, b"")

    def next_due_s(self) -> float | None:
        ack = None if self._owed_since_s is None else self._owed_since_s + ACK_AFTER_S
        times = [t for t in (ack, self._resend_at_s) if t is not None]
        return min(times) if times else None

    def _frame(self, sequence: int, payload: bytes) -> Frame:
        self._owed, self._owed_since_s = 0, None
        return Frame(sequence=sequence, acknowledged=self._delivered, payload=payload)

    def _acknowledge(self, upto: int, now_s: float) -> None:
        if upto >= self._next_sequence:  # acknowledges what was never sent: not ours
            return
        has_progress = False
        while self._unacked and self._unacked[0][0] <= upto:
            self._unacked_bytes -= len(self._unacked.popleft()[1])
            has_progress = True
        if not self._unacked:
            self._resend_at_s = None
        elif has_progress:
            # behind a gap the receiver drops what is sent, so what follows a repeat has to be repeated too, at once
            self._resend_at_s = now_s if upto == self._resent_upto else now_s + RESEND_AFTER_S
        if upto > self._resent_upto:
            self._resent_upto = 0
