"""Which workers are alive, from what their heartbeats say.

Owns the last heartbeat of each epoch; acts on nothing. A worker is suspect when it has been silent for
`heartbeat_timeout_s`, or its engine loop has passed the deadline it set itself, even if its thread still speaks.
Invariant: time is an argument; an epoch once suspect is reported once and then forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.messages import Heartbeat


@dataclass(slots=True)
class _Vital:
    heard_s: float
    heartbeat: Heartbeat | None


class Liveness:
    def __init__(self, *, heartbeat_timeout_s: float) -> None:
        self._timeout_s = heartbeat_timeout_s
        self._vitals: dict[str, _Vital] = {}

    def register(self, epoch: str, now_s: float) -> None:
        """Watch an epoch from now on."""
        self._vitals[epoch] = _Vital(now_s, None)

    def forget(self, epoch: str) -> None:
        self._vitals.pop(epoch, None)

    def heard(self, heartbeat: Heartbeat, now_s: float) -> bool:
        """False for an epoch that is not watched."""
        vital = self._vitals.get(heartbeat.epoch)
        if vital is None:
            return False
        vital.heard_s, vital.heartbeat = now_s, heartbeat
        return True

    def suspects(self, now_s: float) -> list[tuple[str, str]]:
        """(epoch, reason) of those that have just become suspect."""
        found = []
        for epoch, vital in list(self._vitals.items()):
            silent_s = now_s - vital.heard_s
            if silent_s > self._timeout_s:
                found.append((epoch, f"silent for {silent_s:.1f} s"))
            elif vital.heartbeat is not None and self._overdue_s(vital, now_s) > 0:
                found.append((epoch, f"its engine loop is {self._overdue_s(vital, now_s):.1f} s past its deadline"))
        for epoch, _ in found:
            del self._vitals[epoch]
        return found

    def last(self, epoch: str) -> Heartbeat | None:
        vital = self._vitals.get(epoch)
        return None if vital is None else vital.heartbeat

    @staticmethod
    def _overdue_s(vital: _Vital, now_s: float) -> float:
        """Deadlines are on the worker's clock: compare with the time it sent, advanced by our own clock."""
        assert vital.heartbeat is not None
        worker_now_ns = vital.heartbeat.sent_ns + int((now_s - vital.heard_s) * 1e9)
        return (worker_now_ns - vital.heartbeat.deadline_ns) / 1e9
