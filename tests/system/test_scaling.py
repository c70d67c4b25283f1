import threading

import pytest
from system_kit import pdserve, wait_until


class Stream:
    """A steady stream of requests from a few threads, until stopped."""

    def __init__(self, server, num_threads=3):
        self._server = server
        self._stop = threading.Event()
        self.finished, self.failed = 0, []
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def _run(self, number):
        at = 0
        while not self._stop.is_set():
            at += 1
            body = {"model": self._server.model, "prompt": [number + 3, at % 190 + 3] * 20, "max_tokens": 12}
            answer = self._server.client.post("/v1/completions", json={**body, "temperature": 0, "ignore_eos": True})
            with self._lock:
                is_good = answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 12
                self.finished += is_good
                if not is_good:
                    self.failed.append(answer.text)

    def stop(self):
        self._stop.set()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def steady(start):
    server = start()
    stream = Stream(server)
    yield server, stream
    stream.stop()
    server.expect_clean()


def sizes(server):
    pools = server.pools()
    return {role: (pools[role]["desired"], pools[role]["actual"]) for role in ("prefill", "decode")}


def test_pools_grow_and_shrink_under_load_and_no_request_fails(steady):
    server, stream = steady
    wait_until(lambda: stream.finished >= 10, "the stream runs")
    up = pdserve(server.folder, "scale", "prefill=2", "decode=2")
    assert up.returncode == 0, up.stderr
    assert sizes(server) == {"prefill": (2, 2), "decode": (2, 2)}
    seen = stream.finished
    wait_until(lambda: stream.finished >= seen + 30, "requests on four workers")
    down = pdserve(server.folder, "scale", "prefill=1", "decode=1")
    assert down.returncode == 0, down.stderr
    wait_until(lambda: sizes(server) == {"prefill": (1, 1), "decode": (1, 1)}, "two workers are left")
    wait_until(lambda: len(server.pools()["processes"]) == 4, "the others have ended")
    seen = stream.finished
    wait_until(lambda: stream.finished >= seen + 10, "the stream goes on")
    assert stream.failed == []


def test_a_pool_cannot_be_scaled_to_nothing(start):
    server = start()
    refused = pdserve(server.folder, "scale", "decode=0")
    assert refused.returncode != 0 and "Traceback" not in refused.stderr
    assert server.admin("PUT", "/admin/pools/decode", json={"replicas": 0}).status_code == 409
    assert server.admin("PUT", "/admin/pools/decode", json={"replicas": "2"}).status_code == 400
    assert server.admin("PUT", "/admin/pools/both", json={"replicas": 2}).status_code == 404
