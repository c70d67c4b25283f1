"""A real server on loopback: OpenAI's client, sockets that close, signals."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest
from front_kit import EOS, FakeCore, front_config, model_folder, replies, token

from coordinator.frontend.server import FrontServer

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model"))


def listening():
    return socket.create_server(("127.0.0.1", 0))


def url_of(sock):
    return "http://{}:{}".format(*sock.getsockname())


@contextlib.contextmanager
def serving(folder, script=None, **changes):
    """A server in a thread, and its core; stopped and joined at the end."""
    core, sock = FakeCore(script), listening()
    server = FrontServer(front_config(folder, drain_s=0.05, **changes), core.connect, sock)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve()))
    core.server, core.loop, core.url, core.address = server, loop, url_of(sock), sock.getsockname()
    thread.start()
    try:
        yield core
    finally:
        loop.call_soon_threadsafe(server.stop)
        thread.join()
        loop.close()
        assert server.front.client.num_open == 0


@pytest.fixture(scope="module")
def core(folder):
    with serving(folder, None) as core:
        core.hello = core.server.front.tokenizer.encode("hello world")
        yield core


@pytest.fixture
def client(core):
    core.script = replies(*core.hello)
    with openai.OpenAI(base_url=core.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


MESSAGES = [{"role": "user", "content": "hello"}]


# --- OpenAI's client -------------------------------------------------------------------------------------------------


def test_openai_chat(client):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=5)
    assert answer.choices[0].message.content == "hello world"
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 2)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_openai_chat_with_samples(client):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, n=3, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


def test_openai_chat_stream(client):
    with client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, n=2, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    for index in range(2):
        own = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert own[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in own) == "hello world"
        assert [choice.finish_reason for choice in own if choice.finish_reason] == ["length"]
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + 4


def test_openai_chat_log_probabilities(client, core):
    def script(core, submit):
        core.output(submit.ticket, [token(item, -0.5, ((item, -0.5), (5, -1.0))) for item in core.hello])
        core.end_sample(submit.ticket, 2)
        core.end(submit.ticket)

    core.script = script
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert [(entry.token, len(entry.top_logprobs)) for entry in content] == [("hello", 2), (" world", 2)]


def test_openai_completion(client):
    answer = client.completions.create(model="tiny", prompt=["hello", "world"], n=2, max_tokens=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(i, "hello world") for i in range(4)]


def test_openai_completion_log_probabilities(client, core):
    def script(core, submit):
        core.output(submit.ticket, [token(item, -0.5, ((item, -0.5),)) for item in core.hello])
        core.end_sample(submit.ticket, 2)
        core.end(submit.ticket)

    core.script = script
    logprobs = client.completions.create(model="tiny", prompt="hello", logprobs=1).choices[0].logprobs
    assert (logprobs.tokens, logprobs.token_logprobs, logprobs.text_offset) == (["hello", " world"], [-0.5] * 2, [0, 5])


def test_openai_completion_stream(client):
    stream = client.completions.create(model="tiny", prompt="hello", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "hello world"


def test_openai_stream_of_an_empty_answer(client, core):
    core.script = replies(EOS, reason="stop")
    chunks = list(client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True))
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, "stop"]


def test_openai_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_openai_extensions(client):
    answer = client.completions.create(
        model="tiny", prompt="hello", extra_body={"include_phases": True, "return_token_ids": True, "top_k": 5}
    )
    assert answer.pdserve["mode"] == "disaggregated"
    assert answer.choices[0].token_ids


@pytest.mark.parametrize(
    ("fields", "kind"),
    [({"model": "gpt-4"}, openai.NotFoundError), ({"temperature": 5}, openai.BadRequestError),
     ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError)],
)  # fmt: skip
def test_openai_errors(client, fields, kind):
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**({"model": "tiny", "messages": MESSAGES} | fields))
    assert caught.value.code and caught.value.param == next(iter(fields))


def test_openai_error_in_a_stream(client, core):
    def script(core, submit):
        core.output(submit.ticket, core.hello[:1])
        core.loop.call_later(0.02, core.end, submit.ticket, "failed")

    core.script = script
    with pytest.raises(openai.APIError):
        list(client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True))


def test_openai_overload(client, core):
    core.script = lambda core, submit: core.end(
        submit.ticket, "rejected", status=429, code="queue_full", message="full", retry_after_s=1
    )
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(model="tiny", prompt="hello")
    assert caught.value.response.headers["retry-after"] == "1"


# --- sockets ---------------------------------------------------------------------------------------------------------


def request_bytes(stream):
    body = json.dumps({"model": "tiny", "prompt": "hello", "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def wait_for(condition):
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("resets", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 1])
def test_a_socket_that_closes_abandons_the_request(folder, stream, resets, num_tokens):
    def script(core, submit):
        if num_tokens:
            core.output(submit.ticket, [50])

    with serving(folder, script) as core:
        sock = socket.create_connection(core.address)
        sock.sendall(request_bytes(stream))
        wait_for(lambda: core.submits)
        if resets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        sock.close()
        wait_for(lambda: core.abandoned)


def test_chunks_go_out_as_they_are_made_even_if_compression_is_offered(folder):
    with (
        serving(folder, lambda core, submit: core.output(submit.ticket, [50])) as core,
        httpx.stream(
            "POST", core.url + "/v1/completions", headers={"accept-encoding": "gzip"},
            json={"model": "tiny", "prompt": "hello", "stream": True},
        ) as response,
    ):  # fmt: skip
        assert next(response.iter_lines()).startswith("data: ")
        assert "content-encoding" not in response.headers


def test_a_huge_prompt_is_refused_while_others_are_served(client, core):
    with httpx.Client(base_url=core.url) as http:
        reply = http.post("/v1/completions", json={"model": "tiny", "prompt": "word " * 1_100_000})
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert http.get("/health").status_code == 200


def test_a_body_over_the_limit_is_a_413(client, core):
    reply = httpx.post(
        core.url + "/v1/completions", content=b" " * 9_000_000, headers={"content-type": "application/json"}
    )
    assert reply.json()["error"]["code"] == "body_too_large"


def test_head_has_no_body(core):
    reply = httpx.head(core.url + "/health")
    assert (reply.status_code, reply.content) == (200, b"")


# --- the end ---------------------------------------------------------------------------------------------------------

PROGRAM = """
import socket, sys
from pathlib import Path
from front_kit import FakeCore, front_config
from coordinator.frontend.server import run

def script(core, submit):
    core.output(submit.ticket, [50])

config = front_config(Path(sys.argv[1]), drain_s=float(sys.argv[2]))
sys.exit(run(config, FakeCore(script).connect, socket.socket(fileno=int(sys.argv[3]))))
"""


@contextlib.contextmanager
def process(folder, timeout_s):
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'tests'}"}
    with listening() as sock:
        arguments = [str(folder), str(timeout_s), str(sock.fileno())]
        child = subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], env=environment, pass_fds=[sock.fileno()])
        url = url_of(sock)
    try:
        httpx.get(url + "/health", timeout=60)
        yield child, url
    finally:
        child.kill()
        child.wait()


def test_a_signal_ends_an_idle_server_with_status_0(folder):
    with process(folder, 5) as (child, _):
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 0


@pytest.mark.parametrize("num_signals", [1, 2])
def test_running_streams_get_an_error_event_at_the_deadline(folder, num_signals):
    body = {"model": "tiny", "prompt": "hello", "stream": True}
    with process(folder, 0.2 if num_signals == 1 else 60) as (child, url):
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=30) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            for _ in range(num_signals):
                child.send_signal(signal.SIGTERM)
                time.sleep(0.05)  # two signals at once are one
            rest = [line for line in lines if line]
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert rest[-1] == "data: [DONE]"
        assert child.wait(20) == 0


def test_no_new_connection_is_taken_after_the_signal(folder):
    body = {"model": "tiny", "prompt": "hello", "stream": True}
    with process(folder, 1) as (child, url), httpx.stream("POST", url + "/v1/completions", json=body) as response:
        next(response.iter_lines())
        child.send_signal(signal.SIGTERM)

        def is_refused():
            try:
                httpx.get(url + "/health")
            except httpx.HTTPError:
                return True
            return False

        wait_for(is_refused)
        assert child.poll() is None


def test_a_client_that_stops_reading_is_given_up_and_its_connection_closed(folder):
    def script(core, submit):
        def more(first):
            for position in range(first, first + 500):
                core.output(submit.ticket, [50], first=position)
            if not core.abandoned:
                core.loop.call_later(0.001, more, first + 500)

        more(0)

    with serving(folder, script, client_stall_timeout_s=0.2, max_model_len=10**6) as core:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(core.address)
        sock.sendall(request_bytes(True))
        wait_for(lambda: core.abandoned)
        wait_for(lambda: not core.server._server.server_state.connections)
        sock.close()
