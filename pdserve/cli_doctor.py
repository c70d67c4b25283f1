"""`pdserve doctor`: what this machine offers, what would be used, and why.

Owns the report's order; each fact comes from the module that decides with it. Invariant: it changes nothing but caches,
and exits 1 when something a server needs is missing.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from pdserve import __version__
from pdserve.config import PoolOptions, cache_folder, runtime_folder
from pdserve.errors import PDServeError
from pdserve.terminal import Progress, write_json

Section = Callable[[], list[str]]


def versions() -> list[str]:
    from importlib.metadata import PackageNotFoundError, version

    lines = [f"pdserve {__version__}, Python {platform.python_version()}, {platform.platform()}"]
    for package in ("torch", "transformers", "triton", "pyzmq", "tokenizers"):
        try:
            lines.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            lines.append(f"{package} is missing")
    return lines


def devices() -> list[str]:
    from pdserve import machine

    cores, num_gpus = machine.allowed_cores(), machine.count_gpus()
    plan = machine.plan_devices(PoolOptions(), cores, num_gpus)
    lines = [f"{len(cores)} cores allowed, {num_gpus} GPUs"]
    for placement in plan.placements:
        pinned = f", cores {','.join(map(str, placement.device.cores))}" if placement.device.cores else ""
        lines.append(f"pdserve up puts its {placement.role} worker on {placement.device.name}{pinned}")
    return [*lines, *plan.notes]


def memory() -> list[str]:
    from pdserve import machine

    available = machine.available_memory_bytes()
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    mode = pages.read_text().split("[")[-1].split("]")[0] if pages.exists() else "not there"
    advice = "" if mode in ("always", "madvise") else "; KV reads are slower without them, set it to madvise"
    return [
        f"{available / 1e9:.1f} GB available; a KV pool takes {machine.DEFAULT_KV_SHARE:.0%} of that per worker",
        f"transparent huge pages: {mode}{advice}",
    ]


def kernels() -> list[str]:
    import pd_kernels

    return list(pd_kernels.describe())


def links() -> list[str]:
    from kv_transfer.selftest import describe

    return list(describe())


def folders() -> list[str]:
    return [f"models and kernels: {cache_folder()}", f"running servers: {runtime_folder()}"]


SECTIONS: dict[str, Section] = {
    "versions": versions,
    "devices": devices,
    "memory": memory,
    "kernels": kernels,
    "links": links,
    "folders": folders,
}


def examine(say: Callable[[str], None]) -> tuple[dict[str, list[str]], bool]:
    """Every section's lines, and whether all could be examined."""
    found: dict[str, list[str]] = {}
    is_well = True
    for name, section in SECTIONS.items():
        say(f"examining {name}")
        try:
            found[name] = section()
        except (PDServeError, ImportError, OSError) as error:
            found[name] = [f"not usable: {error}"]
            is_well = False
    return found, is_well


def doctor(
    json: Annotated[str | None, typer.Option("--json", help="write JSON to FILE, - for stdout", metavar="FILE")] = None,
) -> None:
    """Say what this machine offers, what will be used and why.

    Example: pdserve doctor
    """
    with Progress() as progress:
        found, is_well = examine(progress)
    if json is not None:
        write_json(json, found)
    for name, lines in found.items():
        for index, line in enumerate(lines):
            print(f"{name if index == 0 else '':<10} {line}", file=sys.stderr if json == "-" else sys.stdout)
    raise typer.Exit(0 if is_well else 1)
