"""A tiny model served from one GPU by both pools, KV over tcp: exact, at the same time, and after a worker is killed.

Owns one `pdserve up` and what is asked of it. Invariant: the server and all it started are gone when `run` returns, and
every wait has an end.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.section import Setting, Sink
from bench.report import Check
from pdserve.config import child_environment

NEEDED = (
    "transformers",
    "tokenizers",
    "zmq",
    "msgpack",
    "fastapi",
    "uvicorn",
    "httpx",
    "typer",
    "psutil",
    "safetensors",
)
READY_S = 90.0
NUM_NEW = 24
HELD = ("pdserve_leases", "pdserve_requests", "pdserve_reserved_blocks")
HELD_STATES = ("held", "landing", "draining")
_SAMPLE = re.compile(r"^([a-z_]+)(?:\{(.*)\})? (\S+)$")


def run(setting: Setting, sink: Sink) -> None:
    needed = NEEDED if setting.is_dry else (*NEEDED, "pynvml")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        why = f"not installed: {', '.join(missing)}"
        sink.check(Check(name="served", value=None, bound="runs", is_ok=None, reason=why))
        return
    with tempfile.TemporaryDirectory(prefix="pdserve-gpu-") as folder:
        _serve(setting, sink, Path(folder))


def _serve(setting: Setting, sink: Sink, folder: Path) -> None:
    from bench.references import references
    from bench.tiny_models import NUM_BYTES, save_tiny

    directory = save_tiny("llama3", folder / "tiny-llama", setting.seed)
    rng = random.Random(setting.seed)
    lengths = [rng.randint(1, 200) for _ in range(4 if setting.is_dry else 50)]
    prompts = [[rng.randrange(NUM_BYTES) for _ in range(length)] for length in lengths]
    began_s = time.monotonic()
    server = Server(setting, folder, directory)
    try:
        known = references(directory, prompts, NUM_NEW, say=lambda text: None, cache=folder / "references")
        server.wait_ready(min(READY_S, setting.left_s))
        sink.row("served_ready", time.monotonic() - began_s, "s")
        asked = _Asked(setting, sink, server, known)
        for name in ("exact", "streams", "killed"):
            sink.attempt(f"served {name}", setting, getattr(asked, name))
        sink.attempt("served pools", setting, asked.pools_are_empty)
    except Exception:
        sys.stderr.write(server.log.read_text(errors="replace")[-3000:])
        raise
    finally:
        status = server.stop()
    sink.holds("served stops with status 0", status == 0, f"status {status}")


class Server:
    """`pdserve up` with one worker of each role on the GPU; in a dry run on the CPU."""

    def __init__(self, setting: Setting, folder: Path, model: Path) -> None:
        self.log, self._ready, self._folder = folder / "log", folder / "ready", folder
        where = (
            ["--devices", "cpu:0", "--kernels", "reference"]
            if setting.is_dry
            else ["--devices", "cuda:0", "--kernels", "triton"]
        )
        command = [sys.executable, "-m", "pdserve", "up", "--model", str(model), "--port", "0", "--dtype", "float32"]
        command += ["--prefill", "1", "--decode", "1", "--kv-link", "tcp", "--kv-blocks", "300", *where]
        command += ["--max-running", "16", "--ready-file", str(self._ready)]
        environment = {**child_environment(1), "XDG_RUNTIME_DIR": str(folder)}
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
            )
        self.url, self._admin = "", ("", "")

    def wait_ready(self, limit_s: float) -> None:
        wait_until(lambda: self._ready.exists() or self.process.poll() is not None, "the server is ready", limit_s)
        if not self._ready.exists():
            raise RuntimeError(f"the server ended with status {self.process.returncode}")
        self.url = self._ready.read_text().strip()
        [record] = (self._folder / "pdserve").glob("*.json")
        fields = json.loads(record.read_text())
        self._admin = (fields["admin_url"], fields["admin_key"])

    def admin(self, path: str) -> Any:
        import httpx

        url, key = self._admin
        answer = httpx.get(url + path, headers={"Authorization": f"Bearer {key}"}, timeout=30, trust_env=False)
        return answer.json()

    def get(self, path: str) -> tuple[int, str]:
        import httpx

        answer = httpx.get(self.url + path, timeout=30, trust_env=False)
        return answer.status_code, answer.text

    def held(self) -> dict[str, float]:
        """What a pool or the core still holds for a request; nothing, when all have ended."""
        found = {}
        for line in self.get("/metrics")[1].splitlines():
            match = _SAMPLE.match(line)
            if match and float(match[3]):
                is_held = match[1] == "pdserve_kv_blocks" and any(f'state="{state}"' in line for state in HELD_STATES)
                if is_held or match[1] in HELD:
                    found[line.rpartition(" ")[0]] = float(match[3])
        return found

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its children end with it
            return self.process.wait()


def wait_until(condition: Callable[[], Any], what: str, limit_s: float) -> Any:
    end_s = time.monotonic() + limit_s
    while not (value := condition()):
        if time.monotonic() > end_s:
            raise TimeoutError(f"after {limit_s:.0f} s still not: {what}")
        time.sleep(0.02)
    return value


class _Asked:
    """Questions to a server that is ready, and what their answers must be."""

    def __init__(self, setting: Setting, sink: Sink, server: Server, known: Sequence[Any]) -> None:
        from bench.serving import first_model
        from bench.stream_client import server as server_at

        self._setting, self._sink, self._server, self._known = setting, sink, server, known
        self._target = server_at(server.url, None)
        self._model = first_model(self._target, "")

    def exact(self) -> None:
        self._compare("served tokens that differ", self._known)

    def _compare(self, name: str, known: Sequence[Any]) -> None:
        """All at once; a branch where the reference's two likeliest are within a hair is no difference."""
        from bench.arms import Ask, HttpArm, tokens_of
        from bench.judging import branches

        asks = [Ask(prompt=each.prompt, num_new=NUM_NEW) for each in known]
        began_s = time.monotonic()
        texts = tokens_of(HttpArm(self._server.url, self._model).complete(asks))
        found = branches(known, texts)
        wrong = [str(each) for each in found if each.kind == "mismatch"]
        about = {"prompts": len(asks), "near_ties": len(found) - len(wrong)}
        self._sink.row("served_prompts", len(asks) / (time.monotonic() - began_s), "prompts/s", **about)
        bound, reason = f"<= 0 of {len(asks)}", "; ".join(wrong[:2])
        self._sink.check(Check(name=name, value=len(wrong), bound=bound, is_ok=not wrong, reason=reason))

    def _stream(self, prompt: Sequence[int], num_new: int, limit_s: float) -> Any:
        from bench.stream_client import complete

        fields = {"model": self._model, "prompt": list(prompt), "max_tokens": num_new, "temperature": 0}
        fields |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        return complete(self._target, json.dumps(fields).encode(), limit_s)

    def streams(self) -> None:
        num_new, prompts = (16, 2) if self._setting.is_dry else (128, 8)

        async def together() -> list[Any]:
            chosen = [self._known[index % len(self._known)].prompt for index in range(prompts)]
            return await asyncio.gather(*(self._stream(prompt, num_new, 60.0) for prompt in chosen))

        began_s = time.monotonic()
        ended = asyncio.run(together())
        taken_s = time.monotonic() - began_s
        bad = [f"{each.outcome} {each.detail}" for each in ended if each.outcome != "ok" or each.num_output != num_new]
        self._sink.holds(f"{prompts} streams at a time are whole", not bad, "; ".join(bad[:2]))
        self._sink.row("served_streams", prompts * num_new / taken_s, "tokens/s", streams=prompts, tokens=num_new)

    def killed(self) -> None:
        """SIGKILL to the decode worker under a stream: it goes on or says so, and the server is ready again."""
        ended: list[Any] = []
        num_new = 300 if self._setting.is_dry else 800
        prompt = self._known[0].prompt
        stream = threading.Thread(target=lambda: ended.append(asyncio.run(self._stream(prompt, num_new, 60.0))))
        stream.start()
        wait_until(self._decoding, "the stream decodes", 30.0)
        os.kill(self._server.admin("/admin/pools")["processes"]["decode-0"], signal.SIGKILL)
        began_s = time.monotonic()
        stream.join(70)
        outcome = f"{ended[0].outcome}: {ended[0].detail}" if ended else "it hangs"
        is_clean = bool(ended) and (ended[0].outcome in ("ok", "refused") or _says_why(ended[0].detail))
        self._sink.holds("a stream whose worker is killed goes on or fails cleanly", is_clean, outcome)
        limit_s = max(5.0, min(READY_S, self._setting.left_s - 15))
        wait_until(lambda: self._server.get("/ready")[0] == 200, "ready again", limit_s)
        waited_s = time.monotonic() - began_s
        self._sink.row("served_ready_again", waited_s, "s", stream=outcome[:200], texts=len(ended[0].texts_s))
        self._compare("served tokens that differ after the kill", self._known[:10])

    def _decoding(self) -> bool:
        requests = self._server.admin("/admin/requests")["requests"]
        return any(each["state"] == "decode" for each in requests)

    def pools_are_empty(self) -> None:
        try:
            wait_until(lambda: not self._server.held(), "nothing is held", 15.0)
        except TimeoutError:
            self._sink.holds("pools are empty at the end", False, str(self._server.held())[:300])
            return
        self._sink.holds("pools are empty at the end", True)


def _says_why(detail: str) -> bool:
    """An error event of the API, not a lost connection or a wait without end."""
    return bool(detail) and "Error:" not in detail.split(" ")[0] and not detail.startswith("no end after")
