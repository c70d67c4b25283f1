"""A request that ends at its first token costs the decode side nothing."""

import pytest
from system_kit import wait_until

PROMPT = list(range(30, 60))


@pytest.fixture
def untouched(server):
    """Fails if the decode worker took a step."""

    def steps():
        return server.total("pdserve_step_seconds_count", pool="decode")

    wait_until(server.nothing_is_held, "the request before is over")
    before = steps()
    yield
    server.expect_clean()
    server.complete(prompt=[9], max_tokens=2)  # one decode step, so that the counter is known to have been told
    wait_until(lambda: steps() > before, "the counter")
    assert steps() == before + 1


@pytest.fixture
def first(server):
    """The first token of PROMPT, and its text."""
    answer = server.complete(prompt=PROMPT, max_tokens=1)
    return answer["choices"][0]["token_ids"][0], answer["choices"][0]["text"]


def test_one_token_needs_no_decode_worker(server, first, untouched):
    answer = server.complete(prompt=PROMPT, max_tokens=1, include_phases=True)
    assert answer["choices"][0]["token_ids"] == [first[0]]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["pdserve"]["decode_worker"] == ""


def test_end_of_text_as_first_token_ends_it(server, untouched):
    answer = server.complete(prompt=PROMPT, max_tokens=8, logit_bias={"1": 100})
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["text"] == ""
    assert answer["usage"]["completion_tokens"] == 1


def test_a_stop_id_as_first_token_ends_it(server, first, untouched):
    answer = server.complete(prompt=PROMPT, max_tokens=8, stop_token_ids=[first[0]])
    assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["text"]) == ("stop", "")


def test_a_stop_string_as_first_token_ends_it(server, untouched):
    answer = server.complete(prompt=PROMPT, max_tokens=8, logit_bias={"70": 100}, stop=[stop_text(server)])
    assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["text"]) == ("stop", "")


def stop_text(server):
    body = server.client.post("/detokenize", json={"model": server.model, "tokens": [70]}).json()
    return next(value for value in body.values() if isinstance(value, str) and len(value) == 1)


def test_ignored_end_of_text_goes_on(server):
    answer = server.complete(prompt=PROMPT, max_tokens=4, logit_bias={"1": 100}, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 4
