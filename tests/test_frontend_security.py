"""API keys and cross-origin requests."""

import asyncio

import pytest
from front_kit import Bench, in_loop, model_folder, replies

KEY = "sk-secret-one"
PATHS = [
    "/", "/v1/models", "/v1/models/tiny", "/ready", "/metrics", "/docs", "/openapi.json", "/redoc", "//v1/models",
    "/V1/models", "/v1/models/", "/v1/../v1/models", "/%76%31/models", "/health/", "//health", "/HEALTH", "/health/..",
    "/nothing", "/invocations", "/generate", "/admin/pools",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def bench(folder):
    made = Bench(folder, api_keys=(KEY, "sk-clé-two"))
    made.core.script = replies(50)
    return made


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "DELETE"])
@pytest.mark.parametrize("path", PATHS)
def test_nothing_but_health_answers_without_a_key(bench, method, path):
    reply = asyncio.run(bench.call(method, path).done())
    assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
    assert reply.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_no_body_is_read_without_a_key(bench, path):
    call = bench.call("POST", path, {"model": "tiny"})
    assert asyncio.run(call.done()).status == 401
    assert call._incoming


@in_loop
async def test_health_needs_no_key(bench):
    assert (await bench.get("/health")).status == 200


@pytest.mark.parametrize("value", [f"Bearer {KEY}", f"bearer {KEY}", f"BEARER  {KEY} ", "Bearer sk-clé-two"])
def test_every_key_opens_whatever_the_case_of_bearer(bench, value):
    assert asyncio.run(bench.get("/v1/models", authorization=value)).status == 200


@pytest.mark.parametrize(
    "value",
    [KEY, f"Basic {KEY}", "Bearer", "Bearer ", "Bearer x", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Bearer ключ"],
)
def test_other_values_do_not(bench, value):
    assert asyncio.run(bench.get("/v1/models", authorization=value)).status == 401


@in_loop
async def test_no_key_is_ever_logged(bench, caplog):
    caplog.set_level("DEBUG")
    await bench.get("/v1/models", authorization=f"Bearer {KEY}")
    await bench.get("/v1/models", authorization="Bearer wrong-key")
    assert KEY not in caplog.text and "wrong-key" not in caplog.text


# --- other origins ---------------------------------------------------------------------------------------------------

EVIL = "https://evil.example"


@in_loop
async def test_by_default_no_other_origin_is_let_in(folder):
    made = Bench(folder)
    simple = await made.get("/v1/models", origin=EVIL)
    preflight = await made.call(
        "OPTIONS", "/v1/completions", origin=EVIL, access_control_request_method="POST"
    ).done()  # fmt: skip
    for reply in (simple, preflight):
        assert not any(name.startswith("access-control") for name in reply.headers)
    assert preflight.status == 405


@in_loop
async def test_a_page_s_simple_post_is_refused(folder):
    made = Bench(folder)
    made.core.script = replies(50)
    for kind in ("text/plain", ""):
        reply = await made.post("/v1/completions", {"model": "tiny", "prompt": "a"}, origin=EVIL, content_type=kind)
        assert reply.status == 400
    assert made.core.submits == []


@in_loop
async def test_a_configured_origin_is_let_in_and_no_other(folder):
    made = Bench(folder, cors_origin="https://good.example", api_keys=(KEY,))
    good = await made.get("/v1/models", origin="https://good.example", authorization=f"Bearer {KEY}")
    evil = await made.get("/v1/models", origin=EVIL, authorization=f"Bearer {KEY}")
    assert good.headers["access-control-allow-origin"] == "https://good.example"
    assert "access-control-allow-origin" not in evil.headers


@in_loop
async def test_a_preflight_of_a_configured_origin_needs_no_key(folder):
    made = Bench(folder, cors_origin="https://good.example", api_keys=(KEY,))
    reply = await made.call(
        "OPTIONS", "/v1/completions", origin="https://good.example", access_control_request_method="POST",
        access_control_request_headers="authorization,content-type",
    ).done()  # fmt: skip
    assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, "https://good.example")


@in_loop
async def test_every_origin_is_never_let_in_with_credentials(folder):
    made = Bench(folder, cors_origin="*")
    reply = await made.get("/v1/models", origin=EVIL, cookie="a=b")
    assert reply.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in reply.headers
