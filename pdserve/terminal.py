"""Progress for people: one line that is rewritten on a terminal, and silence in a pipe.

Owns nothing but the current line of standard error. Invariant: what is left behind on a terminal is a clean line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class Progress:
    """`with Progress() as progress: progress("2 of 3 workers are ready")`."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()

    def __enter__(self) -> Self:
        return self

    def __call__(self, text: str) -> None:
        if self._is_shown:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self("")


def write_json(path: str, value: Any) -> None:
    """`value` into a file, or alone onto standard output for `-`."""
    text = json.dumps(value, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")
