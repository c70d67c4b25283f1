"""What a bench prints and writes: rows, checks, and on what they were measured.

Owns the JSON shape and the exit status; measures nothing. Invariant: a check that could not run counts as not ok.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdserve import __version__
from pdserve.machine import allowed_cores
from pdserve.terminal import write_json

PACKAGES = ("torch", "transformers", "triton", "numpy", "pyzmq", "tokenizers")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What every bench knows. Without `base_url` it starts what it needs on free ports."""

    json: str | None = None  # file for the report; - is standard output, and then nothing else goes there
    is_quick: bool = False  # under 2 minutes (3 for exactness) instead of the full run
    seed: int = 0
    base_url: str | None = None
    model: str = "smollm2-135m"
    kernels: str = "auto"  # of the servers that it starts


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    value: float
    unit: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    ceiling: float | None = None  # the best the machine can do, in the same unit

    def plain(self) -> dict[str, Any]:
        share = self.value / self.ceiling if self.ceiling else None
        tail = {"value": self.value, "unit": self.unit, "ceiling": self.ceiling, "share_of_ceiling": share}
        return {"name": self.name, **self.parameters, **tail}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A stated target. `bound` reads like `<= 15 ms`; `is_ok` None: it could not run, and `reason` says why."""

    name: str
    value: float | None
    bound: str
    is_ok: bool | None
    reason: str = ""

    def plain(self) -> dict[str, Any]:
        reason = {"reason": self.reason} if self.reason else {}
        return {"name": self.name, "value": self.value, "bound": self.bound, "ok": self.is_ok, **reason}


def at_most(name: str, value: float, bound: float, unit: str) -> Check:
    return Check(name=name, value=value, bound=f"<= {bound:g} {unit}".rstrip(), is_ok=value <= bound)


def at_least(name: str, value: float, bound: float, unit: str) -> Check:
    return Check(name=name, value=value, bound=f">= {bound:g} {unit}".rstrip(), is_ok=value >= bound)


def versions() -> dict[str, str]:
    found = {"pdserve": __version__, "commit": commit(), "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Of the checkout this runs from, with `+` for uncommitted changes; empty outside of one."""
    root = Path(__file__).parent.parent
    try:
        words = ["git", "-C", str(root), "describe", "--always", "--abbrev=7", "--dirty=+", "--exclude=*"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def machine() -> dict[str, Any]:
    """Processor, cores and memory that the numbers belong to."""
    cpu = platform.processor() or platform.machine()
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    total = next((int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    load = [round(value, 2) for value in os.getloadavg()]
    kernel = platform.release()
    return {"cpu": cpu, "cores": len(allowed_cores()), "memory_bytes": total, "kernel": kernel, "load_at_end": load}


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _finite(value: Any) -> Any:
    """JSON knows no NaN and no infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass(slots=True)
class Report:
    """Collects rows and checks; `finish` prints, writes and gives the exit status."""

    options: BenchOptions
    rows: list[Row] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)

    def plain(self) -> dict[str, Any]:
        body = {
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "versions": versions(),
            "machine": {**machine(), "bench_seconds": round(time.monotonic() - self.began_s, 1)},
            "seed": self.options.seed,
            "rows": [row.plain() for row in self.rows],
            "checks": [check.plain() for check in self.checks],
        }
        return dict(_finite(body))

    def say(self, text: str) -> None:
        """For people: not on standard output when the JSON goes there."""
        print(text, file=sys.stderr if self.options.json == "-" else sys.stdout, flush=True)

    @property
    def status(self) -> int:
        return 0 if all(check.is_ok is True for check in self.checks) else 1

    def finish(self) -> int:
        for row in self.rows:
            share = f"  ({row.value / row.ceiling:.0%} of {row.ceiling:.4g})" if row.ceiling else ""
            about = " ".join(f"{key}={_shown(value)}" for key, value in row.parameters.items())
            self.say(f"{row.name:<28} {row.value:>12.4g} {row.unit}{share}  {about}".rstrip())
        for check in self.checks:
            word = {True: "ok", False: "NOT OK", None: "NOT RUN"}[check.is_ok]
            value = "" if check.value is None else f"{check.value:.4g} "
            self.say(f"{word:<8} {check.name}: {value}{check.bound} {check.reason}".rstrip())
        if self.options.json is not None:
            write_json(self.options.json, self.plain())
        return self.status
