"""Compiles the C++ sources once per machine into a cache folder named by digest.

Owns the compiler call and the cache; owns no kernel and loads nothing.
Invariant: a file with its final name is complete: it is written elsewhere and renamed, so racing processes are safe.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-fvisibility-inlines-hidden", "-w", "-Wno-psabi")
EXACT = frozenset({"gumbel.cpp"})  # bit for bit on every machine: no fused multiply-add
COMPILE_TIMEOUT_S = 300


class BuildError(Exception):
    """The native kernels cannot be compiled or stored here; the message is one line."""


def default_folder() -> Path:
    """$XDG_CACHE_HOME/pdserve/kernels, or the same under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "pdserve" / "kernels"


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """What to compile with and where to keep the result."""

    compilers: tuple[str, ...] = ("c++", "g++", "clang++")  # the first that exists is used
    arch: str = "native"
    folder: Path = field(default_factory=default_folder)

    def compiler(self) -> str | None:
        return next((path for name in self.compilers if (path := shutil.which(name)) is not None), None)


def build(tools: Toolchain) -> Path:
    """The compiled library, from the cache or made now. Raises BuildError."""
    compiler = tools.compiler()
    if compiler is None:
        raise BuildError(f"no C++ compiler found (looked for {', '.join(tools.compilers)})")
    target = tools.folder / f"{_digest(compiler, tools.arch)}.so"
    if target.exists():
        return target
    try:
        tools.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=tools.folder, prefix=".build-") as work:
            os.replace(_compile(compiler, tools.arch, Path(work)), target)
    except OSError as error:
        raise BuildError(f"cannot write kernels to {tools.folder}: {error.strerror or error}") from error
    return target


def _sources() -> list[Path]:
    return sorted(SOURCES.glob("*.cpp"))


def _arch_flag(arch: str) -> str:
    return f"-m{'arch' if platform.machine() in ('x86_64', 'AMD64') else 'cpu'}={arch}"


def _flags(source: Path, arch: str) -> tuple[str, ...]:
    return (*FLAGS, _arch_flag(arch), f"-ffp-contract={'off' if source.name in EXACT else 'fast'}")


def _compile(compiler: str, arch: str, work: Path) -> Path:
    """All sources at once, then one link; returns the library inside `work`."""
    objects = [work / f"{source.stem}.o" for source in _sources()]
    commands = [
        [compiler, *_flags(source, arch), "-c", str(source), "-o", str(target)]
        for source, target in zip(_sources(), objects, strict=True)
    ]
    _run_all(commands)
    library = work / "library.so"
    _run_all([[compiler, "-shared", "-fopenmp", *map(str, objects), "-o", str(library)]])
    return library


def _run_all(commands: Sequence[Sequence[str]]) -> None:
    running: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
        for process in running:
            _, errors = process.communicate(timeout=COMPILE_TIMEOUT_S)
            if process.returncode != 0:
                raise BuildError(f"{commands[0][0]} failed: {_first_error(errors)}")
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{commands[0][0]} took longer than {COMPILE_TIMEOUT_S} s") from error
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()


def _first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")


@lru_cache(maxsize=8)
def _digest(compiler: str, arch: str) -> str:
    """Of everything the result depends on: sources, flags, compiler and, for `native`, the CPU's feature flags."""
    digest = hashlib.blake2b(digest_size=16)
    for source in (*_sources(), *sorted(SOURCES.glob("*.h"))):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
        digest.update(repr(_flags(source, arch)).encode())
    digest.update(compiler_version(compiler).encode())
    digest.update(cpu_features().encode() if arch == "native" else b"")
    return digest.hexdigest()


@lru_cache(maxsize=8)
def compiler_version(compiler: str) -> str:
    """First line of `compiler --version`. Raises BuildError when it does not even say that."""
    try:
        answer = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{compiler} does not run: {error}") from error
    return (answer.stdout.splitlines() or [""])[0]


@lru_cache(maxsize=1)
def cpu_features() -> str:
    """Machine type and the CPU's feature flags as Linux lists them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2] for line in lines if line.lower().startswith(("flags", "features", "model name"))]
    return f"{platform.machine()} {' '.join(named[:2])}"
