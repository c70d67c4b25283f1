"""A request's clock: stamps in, phases out.

Owns when things happened to one request; decides nothing. Time is cut at consecutive boundaries, each clamped to its
neighbours, so the phases are never negative and sum to finished - received whatever the stamps say.
Of a failed attempt, the time since its placement is `lost`; once tokens are out, the pause until the next one is.
"""

from __future__ import annotations

from pdserve import phases as names

# The phase that ends with each stamp, in order; `first_token_sent` runs beside the hand-off, whose tail follows it.
_ENDS = (
    (names.PREFILL_STARTED, "prefill_wait"),
    (names.FIRST_TOKEN_READY, "prefill"),
    (names.FIRST_TOKEN_SENT, "first_send"),
    (names.JOINED, "handoff_tail"),
    (names.DECODE_STARTED, "decode_wait"),
    (names.SECOND_TOKEN, "first_decode"),
)
_SIDE = (names.TRANSFER_STARTED, names.TRANSFER_DONE)


class Clock:
    def __init__(self, received_ns: int) -> None:
        self.received_ns = received_ns
        self.num_clamped = 0
        self._edge_ns = received_ns  # time before it is attributed
        self._spent_ns = dict.fromkeys(names.PHASES, 0)
        self._stamps: dict[str, int] = {}  # of the present attempt
        self._is_placed = False
        self._is_resuming = False  # tokens are out, their attempt failed
        self._is_resumed = False
        self._last_token_ns = 0
        self.first_sent_ns: int | None = None

    def admitted(self, now_ns: int) -> None:
        self._attribute("admission", now_ns)

    def placed(self, now_ns: int) -> None:
        if not self._is_resuming:
            self._attribute("queue", now_ns)
            self._stamps = {}
        self._is_placed = True

    def stamp(self, name: str, time_ns: int, now_ns: int) -> None:
        """A worker's stamp, at the latest now; the first of its name counts."""
        if time_ns > now_ns:
            self.num_clamped += 1
            time_ns = now_ns
        if name not in self._stamps and (name in _SIDE or not (self._is_resuming or self._is_resumed)):
            self._stamps[name] = time_ns

    def sent_first(self, now_ns: int) -> None:
        self.first_sent_ns = self._stamps.setdefault(names.FIRST_TOKEN_SENT, now_ns)

    def accepted(self, now_ns: int) -> None:
        """A token was accepted and goes to the client."""
        self._last_token_ns = now_ns
        if self._is_resuming:
            self._attribute("lost", now_ns)
            self._is_resuming, self._is_resumed = False, True

    def lose(self, now_ns: int) -> None:
        """The attempt is over and the request waits again."""
        self._is_placed = False
        if self._is_resuming:
            return
        if self.first_sent_ns is None:
            self._attribute("lost", now_ns)
            return
        self._fold(self._last_token_ns)
        self._is_resuming = True

    def finish(self, now_ns: int) -> tuple[tuple[str, int], ...]:
        """The phases, in order; nothing may follow."""
        if self._is_resuming:
            self._attribute("lost", now_ns)
        elif self._is_placed:
            self._fold(now_ns)
        else:
            self._attribute("queue", now_ns)
        return tuple(self._spent_ns.items())

    @property
    def transfer_ns(self) -> int:
        started, done = (self._stamps.get(name) for name in _SIDE)
        return 0 if started is None or done is None else max(0, done - started)

    @property
    def transfer_overlap(self) -> float:
        """The share of the transfer that was hidden behind the prefill."""
        ready = self._stamps.get(names.FIRST_TOKEN_READY)
        if self.transfer_ns == 0 or ready is None:
            return 0.0
        return min(1.0, max(0.0, (ready - self._stamps[names.TRANSFER_STARTED]) / self.transfer_ns))

    def seconds(self, start: str, end: str) -> float | None:
        """Between two stamps of the present attempt, None if one is missing."""
        first, last = self._stamps.get(start), self._stamps.get(end)
        return None if first is None or last is None else max(0, last - first) / 1e9

    def stamps(self) -> dict[str, int]:
        return dict(self._stamps)

    def _fold(self, until_ns: int) -> None:
        """Attribute everything up to `until_ns`; what follows the last stamp belongs to the phase it opened."""
        open_phase = "decode" if self._is_resumed else "prefill_wait"
        if not self._is_resumed:
            following = [phase for _, phase in _ENDS[1:]] + ["decode"]
            for (name, phase), next_phase in zip(_ENDS, following, strict=True):
                if name in self._stamps:
                    self._attribute(phase, min(self._stamps[name], until_ns))
                    open_phase = next_phase
        self._attribute(open_phase, until_ns)

    def _attribute(self, phase: str, until_ns: int) -> None:
        if until_ns < self._edge_ns:
            self.num_clamped += 1
            return
        self._spent_ns[phase] += until_ns - self._edge_ns
        self._edge_ns = until_ns
