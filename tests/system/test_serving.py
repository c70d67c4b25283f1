import openai
import pytest

PROMPT = list(range(10, 50))


@pytest.fixture(scope="module")
def client(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    yield client
    client.close()


def test_a_prompt_runs_on_one_worker_and_its_tokens_come_from_another(server):
    answer = server.complete(prompt=PROMPT, max_tokens=8, include_phases=True)
    details = answer["pdserve"]
    assert (details["mode"], details["prefill_worker"], details["decode_worker"]) == (
        "disaggregated",
        "prefill-0",
        "decode-0",
    )
    assert len(answer["choices"][0]["token_ids"]) == 8
    assert answer["usage"]["completion_tokens"] == 8


def test_phases_sum_to_what_the_request_took(server):
    phases = server.complete(prompt=PROMPT, max_tokens=8, include_phases=True)["pdserve"]["phases_ms"]
    assert min(phases.values()) >= 0
    assert phases["prefill"] > 0 and phases["decode"] > 0


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48])
def test_the_second_and_third_answer_are_the_first_and_came_from_the_cache(server, length):
    prompt = [(7 * length + 3 * at) % 190 + 3 for at in range(length)]
    answers = [server.complete(prompt=prompt, max_tokens=8) for _ in range(3)]
    assert len({tuple(answer["choices"][0]["token_ids"]) for answer in answers}) == 1
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached == [0, *[16 * ((length - 1) // 16)] * 2]


def test_the_openai_client_streams_what_it_gets_at_once(client, server):
    whole = client.completions.create(model=server.model, prompt=PROMPT, max_tokens=12, temperature=0)
    parts = client.completions.create(
        model=server.model,
        prompt=PROMPT,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(parts)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12


def test_the_openai_client_chats_with_samples_and_logprobs(client, server):
    answer = client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": "hello"}],
        n=3,
        seed=11,
        max_completion_tokens=6,
        logprobs=True,
        top_logprobs=2,
        extra_body={"ignore_eos": True},
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    assert all(len(choice.logprobs.content) == 6 for choice in answer.choices)
    assert all(len(token.top_logprobs) == 2 for choice in answer.choices for token in choice.logprobs.content)


def test_the_openai_client_raises_what_it_should(client, server):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="x")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=server.model, prompt="x", temperature=3)


def test_seeded_samples_are_the_same_alone_and_in_a_batch(client, server):
    def tokens(**fields):
        answer = server.complete(prompt=PROMPT, max_tokens=10, temperature=1, ignore_eos=True, **fields)
        return [choice["token_ids"] for choice in answer["choices"]]

    together = tokens(seed=40, n=4)
    assert [tokens(seed=40 + sample)[0] for sample in range(4)] == together


def test_prompt_lists_and_samples_come_back_in_order(server):
    one = [server.complete(prompt=[20 + at, 21, 22], max_tokens=5)["choices"][0]["token_ids"] for at in range(2)]
    answer = server.complete(prompt=[[20, 21, 22], [21, 21, 22]], n=2, max_tokens=5)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["token_ids"] for choice in answer["choices"]] == [one[0], one[0], one[1], one[1]]


def test_health_ready_models_and_tokenize_answer(server):
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/ready").status_code == 200
    ids = server.client.post("/tokenize", json={"model": server.model, "prompt": "hi"}).json()["tokens"]
    text = server.client.post("/detokenize", json={"model": server.model, "tokens": ids}).json()
    assert "hi" in text.values()


def test_the_operators_listener_wants_its_key(server):
    import httpx

    assert httpx.get(server.record.admin_url + "/admin/pools").status_code == 401
    assert server.pools()["prefill"]["actual"] == 1


METRICS = [
    "pdserve_requests_started_total",
    "pdserve_requests_ended_total",
    "pdserve_requests",
    "pdserve_kv_blocks",
    "pdserve_leases",
    "pdserve_leases_expired_total",
    "pdserve_transfers",
    "pdserve_transfer_bytes_total",
    "pdserve_transfer_seconds",
    "pdserve_reads_rejected_total",
    "pdserve_cached_tokens_total",
    "pdserve_mode_total",
    "pdserve_preemptions_total",
    "pdserve_evicted_blocks_total",
    "pdserve_recomputed_tokens_total",
    "pdserve_discarded_tokens_total",
    "pdserve_phase_seconds",
    "pdserve_ttft_seconds",
    "pdserve_itl_seconds",
    "pdserve_tpot_seconds",
    "pdserve_step_seconds",
    "pdserve_loop_lag_seconds",
    "pdserve_messages_ignored_total",
]


def test_every_metric_of_the_contract_is_exported(server):
    server.complete(prompt=PROMPT, max_tokens=8)
    lines = server.client.get("/metrics").text.splitlines()
    families = {line.split()[2] for line in lines if line.startswith("# TYPE ")}
    assert [name for name in METRICS if name not in families] == []


def test_a_decode_pool_with_rounded_weights_reads_full_kv_and_says_what_it_is(start, server):
    rounded = start("--decode-weights", "int8", "--kernels", "cpu")
    answer = rounded.complete(prompt=PROMPT, max_tokens=8, include_phases=True)
    assert answer["pdserve"]["mode"] == "disaggregated" and len(answer["choices"][0]["token_ids"]) == 8
    first = server.complete(prompt=PROMPT, max_tokens=1)["choices"][0]["token_ids"]
    assert answer["choices"][0]["token_ids"][:1] == first  # full weights draw it, whatever decodes
    (model,) = rounded.client.get("/v1/models").json()["data"]
    assert model["weights"] == {"prefill": "float32", "decode": "int8"}
    rounded.expect_clean()
