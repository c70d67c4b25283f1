"""Everything that can only be known on a GPU, in one run: `python bench/gpu_check.py --json out.json`.

It checks every Triton kernel against float64, measures kernels and engine against ceilings of the same GPU, serves a
tiny model from it with a worker killed on the way, and ends within 8 minutes with status 1 when a check is not ok.
Owns the sections, their order and their time; each runs in a process of its own. Invariant: a section that crashes,
hangs or leaves the GPU in ruins costs its own results from there on and nobody else's.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATHS = [str(ROOT), str(ROOT / "kernels")]
sys.path[:] = PATHS + [path for path in sys.path if path not in (*PATHS, str(ROOT / "bench"))]

from bench.gpu.section import Setting, Sink, found  # noqa: E402
from bench.report import BenchOptions, Check, Report  # noqa: E402
from pdserve.config import child_environment  # noqa: E402
from pdserve.terminal import write_json  # noqa: E402

BUDGET_S = 465.0  # of all sections together
UNITS = {"ceiling_read": ("read", 1e9), "ceiling_copy": ("copy", 1e9), "ceiling_gemm": ("gemm", 1e12)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    name: str  # of the module under bench.gpu, too
    stage: int  # sections of one stage run at the same time: those that measure have a stage of their own
    limit_s: float


SECTIONS = (
    Section(name="environment", stage=0, limit_s=60),
    Section(name="prefill", stage=1, limit_s=150),
    Section(name="decode", stage=1, limit_s=150),
    Section(name="layer", stage=1, limit_s=150),
    Section(name="sampling", stage=1, limit_s=150),
    Section(name="blocks", stage=1, limit_s=60),
    Section(name="served", stage=1, limit_s=150),
    Section(name="speed", stage=2, limit_s=130),
    Section(name="engine", stage=3, limit_s=140),
)


@dataclass(slots=True, kw_only=True)
class _Child:
    section: Section
    process: subprocess.Popen[bytes]
    file: Path
    log: Path
    began_s: float
    limit_s: float
    is_late: bool = False


class Collector:
    """One run: the options, the report so far, and where sections leave their lines."""

    def __init__(self, asked: argparse.Namespace, folder: Path) -> None:
        self._asked = asked
        self._folder = folder
        self._end_s = time.monotonic() + asked.budget_s
        self.report = Report(BenchOptions(json=asked.json, is_quick=asked.dry, seed=asked.seed))

    def run(self) -> int:
        wanted = self._asked.only.split(",") if self._asked.only else [section.name for section in SECTIONS]
        for stage in sorted({section.stage for section in SECTIONS}):
            chosen = [section for section in SECTIONS if section.stage == stage and section.name in wanted]
            children = [self._start(section) for section in chosen]
            try:
                self._wait(children)
            finally:
                for child in children:
                    _end(child)
            for child in children:
                self._collect(child)
            if self._asked.json not in (None, "-"):
                write_json(self._asked.json, self.report.plain())
        return self.report.finish()

    def _start(self, section: Section) -> _Child:
        file, log = (self._folder / f"{section.name}.{end}" for end in ("lines", "log"))
        limit_s = max(1.0, min(section.limit_s, self._end_s - time.monotonic()))
        ceilings = {UNITS[row.name][0]: row.value * UNITS[row.name][1] for row in self.report.rows if row.name in UNITS}
        command = [sys.executable, "-u", str(Path(__file__).resolve()), "--section", section.name, "--lines", str(file)]
        command += ["--limit-s", f"{limit_s:.1f}", "--ceilings", json.dumps(ceilings), "--seed", str(self._asked.seed)]
        command += ["--dry"] if self._asked.dry else []
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(self._asked.dry),
                start_new_session=True,
            )
        began_s = time.monotonic()
        return _Child(section=section, process=process, file=file, log=log, began_s=began_s, limit_s=limit_s)

    def _wait(self, children: list[_Child]) -> None:
        """Until all have ended or are past their limit, which they know and keep themselves if they can."""
        while running := [child for child in children if child.process.poll() is None and not child.is_late]:
            for child in running:
                if time.monotonic() > child.began_s + child.limit_s + self._asked.grace_s:
                    child.is_late = True
                    _end(child)
            time.sleep(0.05)

    def _collect(self, child: _Child) -> None:
        name, status = child.section.name, child.process.returncode
        rows, checks = found(child.file)
        if status != 0:
            words = child.log.read_text(errors="replace").strip().splitlines()
            why = f"stopped after {child.limit_s:.0f} s" if child.is_late else f"ended with status {status}"
            reason = f"{why}: {words[-1][:200] if words else 'it printed nothing'}"
            checks.append(Check(name=f"section_{name}", value=None, bound="ends", is_ok=False, reason=reason))
        if any(check.is_ok is not True for check in checks):
            sys.stderr.write(child.log.read_text(errors="replace")[-6000:])
        num_ok = sum(check.is_ok is True for check in checks)
        self.report.say(f"section {name}: {len(rows)} rows, {num_ok} of {len(checks)} checks ok")
        self.report.rows += rows
        self.report.checks += checks


def environment(is_dry: bool) -> dict[str, str]:
    """Of a section: this checkout is found first, and in a dry run Triton interprets."""
    ours = child_environment(1 if is_dry else 4)
    search = os.pathsep.join([*PATHS, *filter(None, [ours.get("PYTHONPATH")])])
    return {**ours, "PYTHONPATH": search, "TRITON_INTERPRET": "1" if is_dry else "0"}


def _end(child: _Child) -> None:
    """The section and whatever it started: they are a process group."""
    if child.process.poll() is None:
        os.killpg(child.process.pid, signal.SIGKILL)
        child.process.wait()


def _enter(name: str, setting: Setting, sink: Sink) -> None:
    importlib.import_module(f"bench.gpu.{name}").run(setting, sink)


def run_section(asked: argparse.Namespace) -> int:
    """Inside of a section's process."""
    began_s = time.monotonic()
    setting = Setting(
        is_dry=asked.dry,
        deadline_s=began_s + asked.limit_s,
        seed=asked.seed,
        ceilings=json.loads(asked.ceilings),
    )
    sink = Sink(Path(asked.lines))
    sink.attempt(f"section_{asked.section}", setting, lambda: _enter(asked.section, setting, sink))
    sink.row("section_seconds", round(time.monotonic() - began_s, 2), "s", section=asked.section)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="checks and measures the Triton kernels and the engine on one GPU")
    parser.add_argument("--json", help="write the report to this file, - for standard output")
    parser.add_argument("--only", help=f"sections, comma separated: {','.join(s.name for s in SECTIONS)}")
    parser.add_argument(
        "--dry", action="store_true", help="tiny shapes on the CPU, Triton interpreted: tests this file"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="for all sections together")
    for hidden in ("--section", "--lines", "--ceilings"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--limit-s", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--grace-s", type=float, default=10.0, help="for a section past its time, before it is killed")
    asked = parser.parse_args()
    if asked.section:
        return run_section(asked)
    unknown = set(asked.only.split(",") if asked.only else ()) - {section.name for section in SECTIONS}
    if unknown:
        parser.error(f"no such section: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="pdserve-gpu-") as folder:
        return Collector(asked, Path(folder)).run()


if __name__ == "__main__":
    sys.exit(main())
