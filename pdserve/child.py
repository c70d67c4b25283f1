"""How one process of ours starts another, and dies with it.

The parent keeps the write end of the child's standard input: the first line carries the child's configuration as JSON,
and end of file means that the parent is gone. Invariant: no child outlives its parent by more than a moment, however
the parent died, because a thread of the child waits for that end of file and ends the process.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from pdserve.config import child_environment
from pdserve.errors import PDServeError

# kind -> the module whose `main(config) -> int` runs it; imported only in the child
KINDS = {
    "core": "coordinator.core",
    "frontend": "coordinator.frontend.main",
    "prefill": "prefill_node.main",
    "decode": "decode_node.main",
}


def spawn(
    kind: str, config: dict[str, Any], *, pass_fds: Sequence[int] = (), num_threads: int = 1
) -> subprocess.Popen[bytes]:
    """Start a child of one of `KINDS`; `config` must be plain JSON data."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind of child {kind!r}")
    process = subprocess.Popen(
        [sys.executable, "-m", "pdserve.child", kind],
        stdin=subprocess.PIPE,
        env=child_environment(num_threads),
        pass_fds=tuple(pass_fds),
        start_new_session=True,  # a Ctrl-C on the terminal is the supervisor's to handle
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(config).encode() + b"\n")
    process.stdin.flush()
    return process


def _first_line() -> bytes:
    """Unbuffered: what follows on standard input belongs to the watching thread. A pipe, so one read per chunk."""
    line = bytearray()
    while not line.endswith(b"\n"):
        chunk = os.read(0, 65536)  # the parent writes nothing after the line
        if not chunk:
            return b""
        line += chunk
    return bytes(line)


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(3)


def main() -> int:
    """Entry of `python -m pdserve.child KIND`."""
    kind = sys.argv[1]
    line = _first_line()
    if not line:
        return 3
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()
    try:
        module = importlib.import_module(KINDS[kind])
        return int(module.main(json.loads(line)))
    except PDServeError as error:
        print(f"pdserve {kind}: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
