"""Real processes under test: a server on free ports with a tiny model, what it says of itself, and the oracles."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from pdserve.runtime import RuntimeRecord

HANG_S = 60.0  # guards against hanging only
SAMPLE_LINE = re.compile(r"^([a-z_]+)(?:\{(.*)\})? (\S+)$")
LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')


def wait_until(condition: Callable[[], Any], what: str, seconds: float = HANG_S) -> Any:
    """The first true value of `condition`; fails, naming `what`, after `seconds`."""
    end_s = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end_s, f"gave up waiting: {what}"
        time.sleep(0.02)


def environment(folder: Path) -> dict[str, str]:
    root = Path(__file__).parents[1]
    return {
        **os.environ,
        "PYTHONPATH": f"{root}{os.pathsep}{root / 'kernels'}",
        "XDG_RUNTIME_DIR": str(folder),
    }


def pdserve(folder: Path, *arguments: str, seconds: float = HANG_S) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    command = [sys.executable, "-m", "pdserve", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, env=environment(folder), check=False
    )


class Server:
    """`pdserve up` and everything under it."""

    def __init__(self, folder: Path, model: Path, *flags: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.log = folder / "log"
        ready = folder / "ready"
        command = [sys.executable, "-m", "pdserve", "up", "--model", str(model), "--port", "0"]
        size = () if "--kv-blocks" in flags else ("--kv-memory-gb", "0.02")
        command += ["--ready-file", str(ready), "--dtype", "float32", *size, *flags]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment(folder))
        try:
            wait_until(lambda: ready.exists() or self.process.poll() is not None, "ready")
            assert ready.exists(), self.log.read_text()
        except BaseException:
            self.process.kill()
            raise
        self.url = ready.read_text().strip()
        [record] = (folder / "pdserve").glob("*.json")
        self.record = RuntimeRecord(**json.loads(record.read_text()))
        self.client = httpx.Client(base_url=self.url, timeout=HANG_S)
        self.model = self.client.get("/v1/models").json()["data"][0]["id"]

    def complete(self, **fields: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        body = {"model": self.model, "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, **fields}
        body.setdefault("return_token_ids", True)
        answer = self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def admin(self, method: str, path: str, **keywords: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.record.admin_key}"}
        return httpx.request(method, self.record.admin_url + path, headers=headers, timeout=HANG_S, **keywords)

    def pools(self) -> dict[str, Any]:
        return self.admin("GET", "/admin/pools").json()

    def pid(self, name: str) -> int:
        return self.pools()["processes"][name]

    def worker(self, name: str) -> dict[str, Any]:
        pools = self.pools()
        return next(each for role in ("prefill", "decode") for each in pools[role]["workers"] if each["name"] == name)

    def metrics(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        found = {}
        for line in self.client.get("/metrics").text.splitlines():
            if match := SAMPLE_LINE.match(line):
                found[(match[1], tuple(sorted(LABEL.findall(match[2] or ""))))] = float(match[3])
        return found

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric over all label sets that contain `labels`."""
        wanted = set(labels.items())
        return sum(value for (each, has), value in self.metrics().items() if each == name and wanted <= set(has))

    def nothing_is_held(self) -> bool:
        """Oracles 1, 2 and 6: no block, lease, request or reservation is left, and every request ended once."""
        numbers = self.metrics()

        def total(name: str, **labels: str) -> float:
            wanted = set(labels.items())
            return sum(value for (each, has), value in numbers.items() if each == name and wanted <= set(has))

        held = sum(total("pdserve_kv_blocks", state=state) for state in ("held", "landing", "draining"))
        left = held + total("pdserve_leases") + total("pdserve_requests") + total("pdserve_reserved_blocks")
        return left == 0 and total("pdserve_requests_started_total") == total("pdserve_requests_ended_total")

    def expect_clean(self, before: dict[str, int] | None = None) -> None:
        """Nothing leaks, and no process was replaced that `before` (name to pid) knew."""
        wait_until(self.nothing_is_held, f"nothing is held: {self.leftovers()}", 15.0)
        for name, pid in (before or {}).items():
            assert self.pools()["processes"][name] == pid, name

    def leftovers(self) -> dict[str, Any]:
        names = ("pdserve_kv_blocks", "pdserve_leases", "pdserve_requests", "pdserve_reserved_blocks")
        return {str(key): value for key, value in self.metrics().items() if key[0] in names and value}

    def stop(self) -> int:
        self.client.close()
        children = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(30)
        finally:
            for child in children:
                if child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
                    child.kill()
        return status
