"""The small routes, and what every answer has in common."""

import asyncio
import json

import pytest
from front_kit import Bench, in_loop, model_folder, replies


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def bench(folder):
    made = Bench(folder, served_names=("tiny", "org/alias"))
    made.core.script = replies(50)
    return made


@in_loop
async def test_every_served_name_is_listed_with_its_context(bench):
    body = (await bench.get("/v1/models")).json
    assert body["object"] == "list"
    assert [(model["id"], model["max_model_len"]) for model in body["data"]] == [("tiny", 128), ("org/alias", 128)]


@pytest.mark.parametrize("name", ["tiny", "org/alias"])
def test_a_model_is_found_by_name(bench, name):
    assert asyncio.run(bench.get(f"/v1/models/{name}")).json["id"] == name


@in_loop
async def test_an_unknown_model_is_not_found(bench):
    reply = await bench.get("/v1/models/gpt-4")
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")


@in_loop
async def test_health_answers_without_a_core(bench):
    bench.core.is_connected = False
    assert (await bench.get("/health")).status == 200


@in_loop
async def test_ready_goes_through_the_core_and_names_the_pools(bench):
    reply = await bench.get("/ready")
    assert (reply.status, reply.json["status"], reply.json["pools"]["prefill"]) == (200, "ready", "1 ready")


@pytest.mark.parametrize("what", ["is_ready", "is_connected"])
def test_not_ready_is_a_503_that_says_why(bench, what):
    setattr(bench.core, what, False)
    reply = asyncio.run(bench.get("/ready"))
    assert (reply.status, reply.json["status"]) == (503, "not ready")


@in_loop
async def test_a_core_that_does_not_answer_is_not_ready(folder):
    made = Bench(folder, ready_timeout_s=0.01)
    made.core.answers_probes = False
    reply = await made.get("/ready")
    assert reply.status == 503 and "did not answer" in reply.json["reason"]


@in_loop
async def test_a_server_that_leaves_is_not_ready_and_takes_nothing_new(bench):
    bench.front.is_leaving = True
    assert (await bench.get("/ready")).status == 503
    reply = await bench.complete()
    assert (reply.status, reply.error["code"]) == (503, "shutting_down")


@in_loop
async def test_text_becomes_ids_and_text_again(bench):
    body = (await bench.post("/tokenize", {"prompt": "hello world"})).json
    assert body == {"count": 2, "max_model_len": 128, "tokens": bench.ids("hello world")}
    back = (await bench.post("/detokenize", {"tokens": body["tokens"]})).json
    assert back == {"prompt": "hello world", "content": "hello world"}


@in_loop
async def test_messages_become_the_ids_that_chat_uses(bench):
    messages = [{"role": "user", "content": "hello"}]
    tokens = (await bench.post("/tokenize", {"model": "tiny", "messages": messages})).json["tokens"]
    await bench.chat()
    assert tuple(tokens) == bench.core.submits[0].prompt


@in_loop
async def test_the_other_name_for_the_text_works_too(bench):
    assert (await bench.post("/tokenize", {"content": "hello"})).json["count"] == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", {}), ("/tokenize", {"prompt": 5}), ("/tokenize", {"prompt": "x" * 10_000}),
     ("/tokenize", {"messages": []}), ("/detokenize", {}), ("/detokenize", {"tokens": [512]}),
     ("/detokenize", {"tokens": ["a"]}), ("/detokenize", {"tokens": [1] * 200})],
)  # fmt: skip
def test_bad_input_to_the_tokenizer_is_a_400(bench, path, body):
    assert asyncio.run(bench.post(path, body)).error["code"]


@in_loop
async def test_an_unknown_model_has_no_tokenizer(bench):
    assert (await bench.post("/tokenize", {"prompt": "a", "model": "x"})).status == 404


# --- what goes wrong before a route ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/nothing", "//v1/models", "/V1/models", "/v1/models/", "/docs", "/openapi.json"]
)
def test_unknown_addresses_are_404_in_the_envelope(bench, path):
    reply = asyncio.run(bench.get(path))
    assert (reply.status, reply.error["type"]) == (404, "invalid_request_error")


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/chat/completions"), ("GET", "/v1/completions"), ("POST", "/v1/models"), ("DELETE", "/health"),
     ("PUT", "/tokenize"), ("OPTIONS", "/v1/completions"), ("POST", "/ready")],
)  # fmt: skip
def test_wrong_methods_are_405_in_the_envelope(bench, method, path):
    reply = asyncio.run(bench.call(method, path).done())
    assert (reply.status, reply.error["code"]) == (405, "method_not_allowed")
    assert reply.headers["allow"]


POSTS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b"null", b'{"a": NaN}'])
def test_broken_bodies_are_400_in_the_envelope(bench, path, raw):
    reply = asyncio.run(bench.post(path, raw))
    assert (reply.status, reply.error["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "json"])
def test_bodies_that_are_not_called_json_are_refused(bench, path, kind):
    reply = asyncio.run(bench.post(path, {"model": "tiny"}, content_type=kind))
    assert (reply.status, reply.error["code"]) == (400, "invalid_content_type")


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"])
def test_other_spellings_of_json_are_taken(bench, kind):
    body = {"model": "tiny", "prompt": "hello"}
    assert asyncio.run(bench.post("/v1/completions", body, content_type=kind)).status == 200


@in_loop
async def test_a_body_that_says_it_is_too_big_is_refused_before_it_is_read(folder):
    made = Bench(folder, max_body_mb=0.001)
    call = made.call("POST", "/v1/completions", b"", content_length="50000000")
    reply = await call.done()
    assert (reply.status, reply.error["code"]) == (413, "body_too_large")
    assert call._incoming  # untouched


@in_loop
async def test_a_body_that_grows_too_big_is_refused_while_it_is_read(folder):
    made = Bench(folder, max_body_mb=0.001)
    call = made.call("POST", "/v1/completions")
    call._incoming = [{"type": "http.request", "body": b"x" * 500, "more_body": True} for _ in range(100)]
    assert (await call.done()).status == 413
    assert len(call._incoming) > 90


@in_loop
async def test_a_body_that_never_comes_is_given_up(folder):
    made = Bench(folder, client_stall_timeout_s=0.01)
    call = made.call("POST", "/v1/completions")
    call._incoming = []
    assert (await call.done()).status == 408


@in_loop
async def test_the_request_s_id_is_echoed_and_nothing_else(bench):
    for path in ("/health", "/nowhere", "/v1/models"):
        assert (await bench.get(path, x_request_id="abc-123")).headers["x-request-id"] == "abc-123"
    assert "x-request-id" not in (await bench.get("/health", x_request_id="a b")).headers
    assert "x-request-id" not in (await bench.get("/health")).headers


@in_loop
async def test_the_same_request_id_twice_makes_two_requests(bench):
    body = {"model": "tiny", "prompt": "hello"}
    calls = [bench.call("POST", "/v1/completions", body, x_request_id="same") for _ in range(2)]
    replies_ = [await call.done() for call in calls]
    assert [reply.status for reply in replies_] == [200, 200]
    assert replies_[0].json["id"] != replies_[1].json["id"]
    assert len({submit.ticket for submit in bench.core.submits}) == 2


@in_loop
async def test_a_bug_is_a_500_in_the_envelope_without_internals(bench, caplog):
    def broken(kind, body):
        raise RuntimeError("/secret/path")

    bench.front.parse = broken
    reply = await bench.complete()
    assert (reply.status, reply.error["code"]) == (500, "internal_error")
    assert "secret" not in json.dumps(reply.error) and "RuntimeError" not in json.dumps(reply.error)
    assert "secret" in caplog.text


@in_loop
async def test_prompts_are_logged_only_when_asked_for(folder, caplog):
    caplog.set_level("DEBUG")
    for does_log, count in ((False, 0), (True, 1)):
        made = Bench(folder, log_prompts=does_log)
        made.core.script = replies(50)
        await made.complete(prompt="quick brown")
        assert sum("quick brown" in record.getMessage() for record in caplog.records) == count
