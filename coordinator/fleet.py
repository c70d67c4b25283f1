"""The supervisor's children: who should run, who runs, and who is started again.

Owns the processes; which of them are alive in the core's eyes is told to it. Invariant: for each role the members that
are not leaving number `desired`, or a start is due; a member that ends is started again, later after each quick death.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

QUICK_DEATH_S = 5.0
LONGEST_PAUSE_S = 10.0


class Process(Protocol):
    """What the fleet needs of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def send_signal(self, number: int) -> None: ...


@dataclass(slots=True)
class Member:
    name: str
    kind: str  # core, frontend, prefill or decode
    start: Callable[[], Process]
    process: Process | None = None
    started_s: float = 0.0
    restart_at_s: float | None = None
    kill_at_s: float | None = None
    is_leaving: bool = False
    quick_deaths: int = 0
    exit_codes: list[int] = field(default_factory=list)

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A member's process has ended, with `code` as `subprocess` reports it."""

    member: Member
    code: int

    @property
    def reason(self) -> str:
        if self.code < 0:
            return f"killed by {signal.Signals(-self.code).name}"
        return f"exit status {self.code}"


class Fleet:
    """`build(kind, name)` gives the function that starts a member of that kind."""

    def __init__(self, build: Callable[[str, str], Callable[[], Process]]) -> None:
        self._build = build
        self._next_number: dict[str, int] = {}
        self.members: dict[str, Member] = {}
        self.desired: dict[str, int] = {}

    def add(self, kind: str, name: str, now_s: float) -> Member:
        member = self.members[name] = Member(name=name, kind=kind, start=self._build(kind, name))
        self._start(member, now_s)
        return member

    def of(self, kind: str) -> list[Member]:
        return [member for member in self.members.values() if member.kind == kind]

    def scale(self, role: str, desired: int, now_s: float) -> list[Member]:
        """Start what is missing; returns the members that have to leave, youngest first, marked so."""
        self.desired[role] = desired
        staying = [member for member in self.of(role) if not member.is_leaving]
        for _ in range(desired - len(staying)):
            number = self._next_number.get(role, 0)
            self._next_number[role] = number + 1
            self.add(role, f"{role}-{number}", now_s)
        leaving = sorted(staying, key=lambda member: member.started_s, reverse=True)[: max(0, len(staying) - desired)]
        for member in leaving:
            member.is_leaving = True
            if member.process is None:  # it was waiting to be started again
                del self.members[member.name]
        return [member for member in leaving if member.process is not None]

    def tick(self, now_s: float) -> list[Ended]:
        """Reap the ended, kill the hung, start again who is due. Returns who ended since the last call."""
        ended = []
        for member in list(self.members.values()):
            if member.process is not None and (code := member.process.poll()) is not None:
                ended.append(Ended(member=member, code=code))
                self._has_ended(member, code, now_s)
            elif member.process is not None and member.kill_at_s is not None and now_s >= member.kill_at_s:
                member.process.send_signal(signal.SIGKILL)
            elif member.process is None and not member.is_leaving and now_s >= (member.restart_at_s or 0.0):
                self._start(member, now_s)
        return ended

    def suspect(self, name: str, kill_at_s: float) -> None:
        """The core no longer hears this worker: kill it at `kill_at_s` unless it recovers."""
        if (member := self.members.get(name)) is not None and member.kill_at_s is None:
            member.kill_at_s = kill_at_s

    def recovered(self, name: str) -> None:
        if (member := self.members.get(name)) is not None:
            member.kill_at_s = None
            member.quick_deaths = 0

    def is_leaving(self, name: str) -> bool:
        member = self.members.get(name)
        return member is not None and member.is_leaving

    def signal_all(self, number: int) -> None:
        for member in self.members.values():
            if member.process is not None and member.process.poll() is None:
                member.process.send_signal(number)

    def stop_restarting(self) -> None:
        for member in self.members.values():
            member.is_leaving = True

    def _has_ended(self, member: Member, code: int, now_s: float) -> None:
        member.process, member.kill_at_s = None, None
        member.exit_codes.append(code)
        if member.is_leaving:
            del self.members[member.name]
            return
        is_quick = now_s - member.started_s < QUICK_DEATH_S
        member.quick_deaths = member.quick_deaths + 1 if is_quick else 0
        pause_s = 0.0 if member.quick_deaths <= 1 else min(LONGEST_PAUSE_S, 2.0 ** (member.quick_deaths - 2))
        member.restart_at_s = now_s + pause_s
        if pause_s == 0.0:
            self._start(member, now_s)

    @staticmethod
    def _start(member: Member, now_s: float) -> None:
        member.process = member.start()
        member.started_s, member.restart_at_s, member.kill_at_s = now_s, None, None
