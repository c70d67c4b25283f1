"""Processes are killed or stopped; clients see nothing, a pause, or one clear error, and never hang."""

import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest
from system_kit import environment, pdserve, wait_until

PROMPT = list(range(20, 90))
SLOWLY = ("--kernels", "reference")  # so that a stream is still going on when somebody looks


@pytest.fixture(scope="module")
def reference(server):
    return server.complete(prompt=PROMPT, max_tokens=300, ignore_eos=True)["choices"][0]["token_ids"]


class Asking(threading.Thread):
    """A request in another thread."""

    def __init__(self, server, **fields):
        super().__init__()
        self._server = server
        self._body = {"model": server.model, "prompt": PROMPT, "temperature": 0, "ignore_eos": True, **fields}
        self.answer = None
        self.start()

    def run(self):
        self.answer = self._server.client.post("/v1/completions", json={**self._body, "return_token_ids": True})

    def result(self):
        self.join(60)
        assert self.answer is not None, "it hangs"
        return self.answer


def decoding(server):
    requests = server.admin("GET", "/admin/requests").json()["requests"]
    return [each for each in requests if each["state"] == "decode"]


def test_a_prefill_worker_that_is_killed_is_replaced_and_nothing_fails(start, reference):
    server = start(*SLOWLY)
    asking = Asking(server, max_tokens=300)
    wait_until(lambda: decoding(server), "it decodes")
    os.kill(server.pid("prefill-0"), signal.SIGKILL)
    assert asking.result().json()["choices"][0]["token_ids"] == reference
    wait_until(lambda: server.client.get("/ready").status_code == 200, "ready again")
    assert server.complete(prompt=PROMPT, max_tokens=300, ignore_eos=True)["choices"][0]["token_ids"] == reference
    server.expect_clean()


def test_a_stream_goes_on_when_its_decode_worker_dies_and_another_is_there(start, reference):
    server = start("--decode", "2", *SLOWLY)
    asking = Asking(server, max_tokens=300)
    [request] = wait_until(lambda: decoding(server), "it decodes")
    os.kill(server.pid(request["decode_worker"]), signal.SIGKILL)
    assert asking.result().json()["choices"][0]["token_ids"] == reference
    server.expect_clean()


def test_with_no_decode_worker_left_a_request_ends_in_a_clear_error_or_waits_as_told(start):
    server = start()
    os.kill(server.pid("decode-0"), signal.SIGSTOP)
    wait_until(lambda: server.client.get("/ready").status_code == 503, "not ready")
    answer = Asking(server, max_tokens=4).result()
    assert answer.status_code == 503
    assert "decode" in answer.json()["error"]["message"]
    wait_until(lambda: server.client.get("/ready").status_code == 200, "the stopped worker is replaced")
    server.complete(prompt=PROMPT)
    server.expect_clean()


def test_a_worker_that_was_stopped_for_a_while_comes_back_with_a_new_epoch(start, reference):
    server = start("--hang-timeout", "60")
    before = server.worker("prefill-0")
    os.kill(before["pid"], signal.SIGSTOP)
    wait_until(lambda: server.pools()["prefill"]["actual"] == 0, "it counts as dead")
    os.kill(before["pid"], signal.SIGCONT)
    wait_until(lambda: server.client.get("/ready").status_code == 200, "ready again")
    after = server.worker("prefill-0")
    assert after["pid"] == before["pid"] and after["epoch"] != before["epoch"]
    assert server.complete(prompt=PROMPT, max_tokens=300, ignore_eos=True)["choices"][0]["token_ids"] == reference
    server.expect_clean()


def test_when_the_core_dies_alone_workers_stay_and_serve_again(start):
    server = start(*SLOWLY)
    pids = server.pools()["processes"]
    asking = Asking(server, max_tokens=400)
    wait_until(lambda: decoding(server), "it decodes")
    os.kill(pids["core"], signal.SIGKILL)
    assert asking.result().status_code in (500, 503)
    wait_until(lambda: server.client.get("/ready").status_code == 200, "ready again")
    after = server.pools()["processes"]
    assert (after["prefill-0"], after["decode-0"]) == (pids["prefill-0"], pids["decode-0"])
    server.complete(prompt=PROMPT)
    server.expect_clean()


def test_nothing_outlives_a_killed_supervisor_and_nothing_is_left_in_shared_memory(start):
    shared = set(os.listdir("/dev/shm"))
    server = start()
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert len(children) >= 4
    server.process.kill()
    wait_until(lambda: not any(alive(child) for child in children), "children have ended")
    assert set(os.listdir("/dev/shm")) <= shared


def alive(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_a_termination_lets_open_streams_finish_and_exits_with_0(start):
    server = start()
    asking = Asking(server, max_tokens=400)
    wait_until(lambda: decoding(server), "it decodes")
    server.process.send_signal(signal.SIGTERM)
    assert asking.result().status_code == 200
    assert server.process.wait(30) == 0
    assert not list((server.folder / "pdserve").glob("*.json"))


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--port", "taken"], "port"),
        (["--kv-blocks", "2"], "kv-blocks"),
        (["--kv-memory-gb", "100000"], "kv-memory-gb"),
        (["--prefill", "0", "--disaggregate", "always"], "--disaggregate"),
        (["--model", "no/such/folder/at/all"], "model"),
        (["--host", "0.0.0.0"], "--host"),
        (["--no-such-flag"], "no-such-flag"),
        (["--temperature", "1"], "temperature"),
    ],
)
def test_a_start_that_cannot_work_is_one_line_and_exit_2(server, tiny_model, tmp_path, flags, names):
    flags = [server.url.rpartition(":")[2] if flag == "taken" else flag for flag in flags]
    model = [] if "--model" in flags else ["--model", str(tiny_model)]
    port = [] if "--port" in flags else ["--port", "0"]
    ended = pdserve(tmp_path, "up", *model, *port, *flags)
    assert ended.returncode == 2, ended.stderr
    assert names in ended.stderr and "Traceback" not in ended.stderr


def test_a_model_folder_without_weights_is_one_line_and_exit_2(tiny_model, tmp_path):
    for path in tiny_model.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    ended = pdserve(tmp_path, "up", "--model", str(tmp_path), "--port", "0")
    assert ended.returncode == 2
    assert len(ended.stderr.strip().splitlines()) == 1 and "safetensors" in ended.stderr


def test_workers_started_by_hand_serve_and_reconnect(tiny_model, tmp_path):
    common = ["--model", str(tiny_model), "--dtype", "float32", "--kv-memory-gb", "0.02"]
    ready = tmp_path / "ready"
    processes = []

    def begin(*arguments):
        command = [sys.executable, "-m", "pdserve", *arguments, *common]
        with (tmp_path / "log").open("a") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment(tmp_path)))

    try:
        port = free_port()
        address = f"127.0.0.1:{port}"
        begin("coordinator", "--port", "0", "--ready-file", str(ready), "--control", address)
        for role in ("prefill", "decode"):
            begin("worker", "--role", role, "--coordinator", f"tcp://{address}", "--cpu-slots", "1")
        wait_until(lambda: ready.exists(), f"ready: {(tmp_path / 'log').read_text()}")
        status = pdserve(tmp_path, "pools")
        assert status.returncode == 0 and "prefill" in status.stdout + status.stderr
    finally:
        for process in reversed(processes):
            process.terminate()
        statuses = [process.wait(30) for process in reversed(processes)]
    assert statuses == [0, 0, 0]


def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_whole_answer_is_not_bounded_by_the_buffer_of_a_stream(start):
    server = start("--client-buffer-kb", "1")
    answer = server.complete(prompt=PROMPT, max_tokens=200, logprobs=5, n=4, ignore_eos=True)
    assert [len(choice["token_ids"]) for choice in answer["choices"]] == [200] * 4
    server.expect_clean()


def test_samples_that_no_pool_could_hold_together_are_refused_before_any_work(start):
    server = start("--kv-blocks", "20")
    body = {"model": server.model, "prompt": PROMPT[:10], "max_tokens": 100, "n": 3, "ignore_eos": True}
    answer = server.client.post("/v1/completions", json=body)
    assert answer.status_code == 400 and "19" in answer.json()["error"]["message"], answer.text
    assert server.total("pdserve_step_seconds_count", pool="prefill") == 0
    assert server.client.post("/v1/completions", json={**body, "n": 2}).status_code == 200
    server.expect_clean()
