"""What every section of the GPU check is given, and where it puts what it finds.

Owns the lines that a section's process leaves in a file for the process that collects them; measures nothing.
Invariant: a line is on disk before the next piece of work begins, so a crash or a time-out costs only what came after.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.report import Check, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """`is_dry`: tiny shapes on the CPU with Triton interpreted; numbers mean nothing, the code is what runs."""

    is_dry: bool
    deadline_s: float  # of `time.monotonic`
    seed: int = 0
    ceilings: Mapping[str, float] = field(default_factory=dict)  # read and copy: bytes/s, gemm: FLOP/s

    @property
    def device(self) -> str:
        return "cpu" if self.is_dry else "cuda:0"

    @property
    def left_s(self) -> float:
        return self.deadline_s - time.monotonic()


class Sink:
    """Rows and checks as JSON lines in `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def row(self, name: str, value: float, unit: str, *, ceiling: float | None = None, **parameters: Any) -> None:
        fields = {"name": name, "value": value, "unit": unit, "ceiling": ceiling, "parameters": parameters}
        self._write({"row": fields})

    def check(self, check: Check) -> None:
        fields = {"name": check.name, "value": check.value, "bound": check.bound, "reason": check.reason}
        self._write({"check": {**fields, "is_ok": check.is_ok}})

    def holds(self, name: str, is_ok: bool, reason: str = "") -> None:
        """A check that is a plain statement."""
        self.check(Check(name=name, value=None, bound="holds", is_ok=is_ok, reason="" if is_ok else reason))

    def attempt(self, name: str, setting: Setting, work: Callable[[], None], *, is_needed: bool = True) -> None:
        """What `work` raises, or has no time left for, is a check that is not ok; whatever comes after still runs.

        Where it is not needed (a rival's kernel) the reason is a row instead.
        """
        if setting.left_s <= 0:
            self.check(Check(name=name, value=None, bound="runs", is_ok=None, reason="no time was left"))
            return
        try:
            work()
        except Exception as error:  # noqa: BLE001  the next piece of work must run whatever this one met
            traceback.print_exc()
            first = (str(error).strip().splitlines() or [""])[0]
            reason = f"{type(error).__name__}: {first}"[:300]
            if is_needed:
                self.check(Check(name=name, value=None, bound="runs", is_ok=False, reason=reason))
            else:
                self.row(name, 0.0, "x", why=reason)

    def _write(self, entry: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def found(path: Path) -> tuple[list[Row], list[Check]]:
    """What a section left in its file; a last line that was cut short is dropped."""
    rows, checks = [], []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if "row" in entry:
            rows.append(Row(**entry["row"]))
        else:
            checks.append(Check(**entry["check"]))
    return rows, checks
