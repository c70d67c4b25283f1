"""POST /v1/chat/completions and /v1/completions without streaming."""

import asyncio

import pytest
from front_kit import EOS, Bench, in_loop, model_folder, replies, token


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def bench(folder):
    made = Bench(folder)
    made.core.script = replies(*made.ids("hello world"))
    yield made
    made.check()


@in_loop
async def test_a_completion_has_openai_s_shape(bench):
    reply = await bench.complete()
    body = reply.json
    assert (reply.status, body["object"], body["model"]) == (200, "text_completion", "tiny")
    assert body["choices"] == [{"index": 0, "text": "hello world", "logprobs": None, "finish_reason": "length"}]
    assert body["id"].startswith("cmpl-") and isinstance(body["created"], int)


@in_loop
async def test_a_chat_answer_has_openai_s_shape(bench):
    body = (await bench.chat()).json
    (choice,) = body["choices"]
    assert (body["object"], body["id"][:9]) == ("chat.completion", "chatcmpl-")
    assert choice["message"] == {"role": "assistant", "content": "hello world", "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)


@in_loop
async def test_usage_counts_the_prompt_once_and_all_samples(bench):
    bench.core.script = replies(*bench.ids("hello world"))
    usage = (await bench.complete(n=3)).json["usage"]
    assert usage == {
        "prompt_tokens": 1, "completion_tokens": 6, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


@in_loop
async def test_cached_tokens_are_in_the_usage(bench):
    def script(core, submit):
        core.output(submit.ticket, [EOS])
        core.end_sample(submit.ticket, 1, reason="stop")
        core.end(submit.ticket, cached_tokens=16)

    bench.core.script = script
    assert (await bench.complete()).json["usage"]["prompt_tokens_details"]["cached_tokens"] == 16


@in_loop
async def test_the_core_gets_the_request_complete(bench):
    await bench.complete(
        max_tokens=5, temperature=0.5, seed=11, stop=["x"], priority=2, cache_salt="s", n=2
    )  # fmt: skip
    (submit,) = bench.core.submits
    assert submit.prompt == tuple(bench.ids("hello"))
    assert (submit.sampling.max_tokens, submit.sampling.seed, submit.sampling.n) == (5, 11, 2)
    assert (submit.stop, submit.priority, submit.salt, submit.tenant) == (("x",), 2, "s", "")
    assert (submit.sampling.eos_token_ids, submit.timeout_s) == ((EOS,), 600.0)


@in_loop
async def test_the_tenant_is_taken_from_its_header(bench):
    body = {"model": "tiny", "prompt": "hello"}
    await bench.post("/v1/completions", body, x_tenant="team-a")
    await bench.post("/v1/completions", body, x_tenant="no such <team>")
    assert [submit.tenant for submit in bench.core.submits] == ["team-a", ""]


@in_loop
async def test_an_absent_seed_is_drawn_anew_each_time(bench):
    await bench.complete()
    await bench.complete()
    first, second = (submit.sampling.seed for submit in bench.core.submits)
    assert first != second


@in_loop
async def test_indexes_are_prompt_times_n_plus_sample(bench):
    def script(core, submit):
        for sample in reversed(range(2)):
            core.output(submit.ticket, [submit.prompt[0] + sample], sample=sample)
            core.end_sample(submit.ticket, 1, sample=sample)
        core.end(submit.ticket)

    bench.core.script = script
    body = (await bench.complete(prompt=[[50], [60], [70]], n=2, return_token_ids=True)).json
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3, 4, 5]
    assert [choice["token_ids"] for choice in body["choices"]] == [[50], [51], [60], [61], [70], [71]]
    assert [choice["prompt_token_ids"] for choice in body["choices"]][::2] == [[50], [60], [70]]
    assert body["usage"]["prompt_tokens"] == 3


@in_loop
async def test_token_ids_of_a_chat(bench):
    body = (await bench.chat(return_token_ids=True)).json
    assert body["choices"][0]["token_ids"] == bench.ids("hello world")
    assert body["prompt_token_ids"] == bench.ids("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")


@in_loop
async def test_phases_are_told_when_asked_for(bench):
    told = (await bench.complete(include_phases=True)).json["pdserve"]
    assert (told["mode"], told["prefill_worker"], told["decode_worker"]) == ("disaggregated", "prefill-0", "decode-0")
    assert told["phases_ms"]["prefill"] == 2.5 and sum(told["phases_ms"].values()) == 3.5
    assert (told["attempts"], told["transfer_ms"], told["transfer_overlap"]) == (1, 0.5, 0.75)
    assert "pdserve" not in (await bench.complete()).json


@in_loop
async def test_phases_of_several_prompts_are_told_of_each(bench):
    told = (await bench.complete(prompt=["hello", "world"], include_phases=True)).json["pdserve"]
    assert [report["mode"] for report in told["prompts"]] == ["disaggregated", "disaggregated"]


@in_loop
async def test_the_mode_is_in_a_header(bench):
    assert (await bench.complete()).headers["x-pdserve-mode"] == "disaggregated"


@in_loop
async def test_unknown_fields_are_named_in_a_header(bench):
    reply = await bench.complete(made_up=1, **{"bad\r\nname": 1, "other": 2})
    assert reply.headers["x-pdserve-ignored"] == "made_up, other"
    assert "x-pdserve-ignored" not in (await bench.complete()).headers


@in_loop
async def test_chat_log_probabilities(bench):
    ids = bench.ids("hello world")

    def script(core, submit):
        core.output(
            submit.ticket, [token(ids[0], -0.5, ((ids[0], -0.5), (7, -1.5))), token(ids[1], -2.0, ((9, -0.1),))]
        )
        core.end_sample(submit.ticket, 2)
        core.end(submit.ticket)

    bench.core.script = script
    content = (await bench.chat(logprobs=True, top_logprobs=2)).json["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["hello", " world"]
    assert content[0]["bytes"] == list(b"hello") and content[0]["logprob"] == -0.5
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -1.5]
    assert set(content[0]["top_logprobs"][0]) == {"token", "logprob", "bytes"}


@in_loop
async def test_completion_log_probabilities(bench):
    ids = bench.ids("hello world")

    def script(core, submit):
        core.output(submit.ticket, [token(ids[0], -0.5, ((ids[0], -0.5),)), token(ids[1], -2.0, ((ids[0], -0.1),))])
        core.end_sample(submit.ticket, 2)
        core.end(submit.ticket)

    bench.core.script = script
    assert (await bench.complete(logprobs=1)).json["choices"][0]["logprobs"] == {
        "tokens": ["hello", " world"],
        "token_logprobs": [-0.5, -2.0],
        "top_logprobs": [{"hello": -0.5}, {"hello": -0.1, " world": -2.0}],
        "text_offset": [0, 5],
    }


@in_loop
async def test_minus_infinity_is_written_as_a_number(bench):
    def script(core, submit):
        core.output(submit.ticket, [token(50, float("-inf"), ((51, float("-inf")), (52, float("nan"))))])
        core.end_sample(submit.ticket, 1)
        core.end(submit.ticket)

    bench.core.script = script
    (entry,) = (await bench.chat(logprobs=True, top_logprobs=2)).json["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"], *(top["logprob"] for top in entry["top_logprobs"])] == [-9999.0] * 3


@in_loop
async def test_a_token_that_is_no_text_is_written_as_its_bytes(bench):
    lone = next(i for i in range(3, 400) if bench.front.tokenizer.table.bytes_of(i) == b"\xf0")
    bench.core.script = replies(lone)
    logprobs = (await bench.complete(logprobs=0)).json["choices"][0]["logprobs"]
    assert (logprobs["tokens"], logprobs["top_logprobs"]) == (["bytes:\\xf0"], None)


@in_loop
async def test_a_stop_string_cuts_the_text_and_tells_the_core(bench):
    def script(core, submit):
        core.output(submit.ticket, bench.ids("hello world"))
        core.output(submit.ticket, bench.ids("hello"), first=2)

    def stopped(stop):
        bench.core.end_sample(stop.ticket, stop.num_generated, reason="stop")
        bench.core.end(stop.ticket)

    bench.core.script, bench.core.on_stop = script, stopped
    body = (await bench.complete(stop=" wor")).json
    assert body["choices"][0]["text"] == "hello"
    assert (body["choices"][0]["finish_reason"], body["usage"]["completion_tokens"]) == ("stop", 2)
    assert [(stop.sample, stop.num_generated) for stop in bench.core.stops] == [(0, 2)]


@in_loop
async def test_a_stop_string_ends_one_sample_and_the_others_go_on(bench):
    hello, world = bench.ids("hello world")

    def script(core, submit):
        core.output(submit.ticket, [hello], sample=0)
        core.output(submit.ticket, [world], sample=1)
        core.output(submit.ticket, [world], sample=1, first=1)
        for sample, count in ((0, 1), (1, 2)):
            core.end_sample(submit.ticket, count, sample=sample)
        core.end(submit.ticket)

    bench.core.script = script
    choices = (await bench.complete(n=2, stop="hello")).json["choices"]
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [
        ("", "stop"),
        (" world world", "length"),
    ]


@in_loop
async def test_a_first_token_that_ends_the_answer_gives_an_empty_one(bench):
    bench.core.script = replies(EOS, reason="stop")
    (choice,) = (await bench.chat()).json["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")


# --- errors ----------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_rejected_request_carries_the_core_s_status_and_retry_after(bench):
    bench.core.script = lambda core, submit: core.end(
        submit.ticket, "rejected", status=429, code="queue_full", message="256 requests wait", retry_after_s=2.2
    )
    reply = await bench.complete()
    assert (reply.status, reply.headers["retry-after"]) == (429, "3")
    assert (reply.error["code"], reply.error["type"]) == ("queue_full", "rate_limit_error")


@in_loop
async def test_a_failed_request_is_an_error_without_internals(bench):
    bench.core.script = lambda core, submit: core.end(submit.ticket, "failed", status=503, code="no_prefill_worker",
                                                      message="no prefill worker is alive")  # fmt: skip
    reply = await bench.chat()
    assert (reply.status, reply.headers["retry-after"]) == (503, "1")
    assert (reply.error["message"], reply.error["type"]) == ("no prefill worker is alive", "server_error")


@pytest.mark.parametrize("status", [0, 200, 999])
def test_a_failure_without_an_error_status_is_a_500(bench, status):
    bench.core.script = lambda core, submit: core.end(submit.ticket, "failed", status=status, message="why")
    assert asyncio.run(bench.complete()).status == 500


@in_loop
async def test_when_one_prompt_fails_the_others_are_abandoned(bench):
    def script(core, submit):
        if submit.ticket == 1:
            core.end(1, "failed", status=500)

    bench.core.script = script
    assert (await bench.complete(prompt=["hello", "world"])).status == 500
    assert [message.ticket for message in bench.core.abandoned] == [2]


@in_loop
async def test_an_end_without_the_end_of_every_sample_is_a_500(bench):
    bench.core.script = lambda core, submit: core.end(submit.ticket)
    assert (await bench.complete()).status == 500


@in_loop
async def test_a_sample_nobody_asked_for_is_a_500(bench):
    bench.core.script = lambda core, submit: core.output(submit.ticket, [5], sample=1)
    assert (await bench.complete()).status == 500


@in_loop
async def test_a_lost_core_is_a_503(bench):
    bench.core.script = lambda core, submit: core.lose()
    reply = await bench.complete()
    assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "scheduler_lost", "1")


@in_loop
async def test_an_unreachable_core_is_a_503(bench):
    bench.core.is_connected = False
    assert (await bench.complete()).status == 503


@in_loop
async def test_a_core_that_is_back_in_a_moment_is_waited_for(bench):
    bench.core.is_connected = False
    asyncio.get_running_loop().call_later(0.05, setattr, bench.core, "is_connected", True)
    assert (await bench.complete()).status == 200


@in_loop
async def test_what_the_pools_could_never_hold_is_refused_before_any_work(bench):
    bench.core.pools = {"max_request_tokens": 40}
    await bench.complete(max_tokens=2)
    await bench.front._limit._task
    reply = await bench.complete(max_tokens=60)
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert "40" in reply.error["message"] and len(bench.core.submits) == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x", "n": 0}, "n"),
        ({"prompt": "hello", "max_tokens": 10**9}, "max_tokens"),
    ],
)
def test_bad_input_never_reaches_the_core(bench, body, param):
    reply = asyncio.run(bench.post("/v1/completions", {"model": "tiny", **body}))
    assert (reply.status, reply.error["param"], bench.core.submits) == (400, param, [])


@in_loop
async def test_a_template_that_raises_is_a_400_with_its_message(tmp_path):
    made = Bench(model_folder(tmp_path, template="{{ raise_exception('roles must alternate') }}"))
    reply = await made.chat()
    assert (reply.status, made.core.submits) == (400, [])
    assert "roles must alternate" in reply.error["message"]


@in_loop
async def test_a_model_without_a_template_still_completes(tmp_path):
    made = Bench(model_folder(tmp_path, template=None))
    made.core.script = replies(50)
    assert (await made.chat()).error["code"] == "no_chat_template"
    assert (await made.complete()).status == 200


# --- clients that leave ----------------------------------------------------------------------------------------------


@in_loop
async def test_a_client_that_leaves_while_it_waits_is_abandoned(bench):
    bench.core.script = None
    call = bench.call("POST", "/v1/completions", {"model": "tiny", "prompt": "hello"})
    await bench.core.arrived.wait()
    call.leave()
    reply = await call.done()
    assert [message.reason for message in bench.core.abandoned] == ["the client left"]
    assert reply.status == 0


@in_loop
async def test_a_client_that_leaves_while_tokens_come_is_abandoned(bench):
    bench.core.script = lambda core, submit: core.output(submit.ticket, [50])
    call = bench.call("POST", "/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "a"}]})
    await bench.core.arrived.wait()
    await asyncio.sleep(0)
    call.leave()
    await call.done()
    assert len(bench.core.abandoned) == 1


@in_loop
async def test_all_prompts_of_a_client_that_leaves_are_abandoned(bench):
    bench.core.script = None
    call = bench.call("POST", "/v1/completions", {"model": "tiny", "prompt": ["a", "b", "c"], "n": 2})
    await bench.core.arrived.wait()
    call.leave()
    await call.done()
    assert sorted(message.ticket for message in bench.core.abandoned) == [1, 2, 3]


@in_loop
async def test_a_client_that_left_before_its_prompt_was_ready_is_never_submitted(bench):
    call = bench.call("POST", "/v1/completions", {"model": "tiny", "prompt": "hello " * 600, "max_tokens": 1})
    call.leave()
    await call.done()
    assert bench.core.submits == []


@in_loop
async def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_error(bench):
    call = bench.call("POST", "/v1/completions")
    call._incoming = [{"type": "http.request", "body": b'{"mod', "more_body": True}]
    call.leave()
    assert (await call.done()).status == 0


@in_loop
async def test_too_many_requests_in_preparation_are_refused(folder):
    made = Bench(folder, max_preparing=0)
    reply = await made.chat()
    assert (reply.status, reply.headers["retry-after"]) == (503, "1")
