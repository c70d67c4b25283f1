"""A server for the length of a bench: the one that was named, or one of our own on free ports.

Owns the started process; measures nothing. Invariant: a server that was started here is gone when the block is left.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError

from bench.report import BenchOptions
from bench.stream_client import Server
from pdserve.errors import PDServeError

READY_LIMIT_S = 300.0
STOP_LIMIT_S = 20.0


@contextmanager
def running_server(options: BenchOptions, flags: Sequence[str], say: Callable[[str], None]) -> Iterator[str]:
    """The base URL to measure; raises `PDServeError` when the server does not get ready."""
    if options.base_url is not None:
        yield options.base_url
        return
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as folder:
        ready = Path(folder) / "ready"
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "pdserve", "up", "--port", "0", "--model", options.model]
        command += ["--ready-file", str(ready), *flags]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield _wait(process, ready, log, say)
        finally:
            process.terminate()
            try:
                process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], ready: Path, log: Path, say: Callable[[str], None]) -> str:
    start_s = time.monotonic()
    while not ready.exists():
        waited_s = time.monotonic() - start_s
        if process.poll() is not None or waited_s > READY_LIMIT_S:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            raise PDServeError(f"the server did not get ready: {last[0] if last else 'it printed nothing'}")
        say(f"starting a server, {waited_s:.0f} s")
        time.sleep(0.1)
    return ready.read_text().strip()


def first_model(target: Server, wanted: str) -> str:
    """`wanted` when the server lists it, else the first model it lists; raises `PDServeError`."""
    host = f"[{target.host}]" if ":" in target.host else target.host
    request = urllib.request.Request(f"http://{host}:{target.port}{target.path}/v1/models")
    if target.api_key:
        request.add_header("Authorization", f"Bearer {target.api_key}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=30) as answer:
            names = [str(model["id"]) for model in json.load(answer)["data"]]
    except (URLError, OSError, ValueError, LookupError) as error:
        raise PDServeError(f"http://{host}:{target.port} does not list its models: {error}") from None
    if not names:
        raise PDServeError(f"http://{host}:{target.port} lists no model")
    return wanted if wanted in names else names[0]
