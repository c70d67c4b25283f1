"""Streams: what is on the wire, event by event."""

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


def text_of(events, index=0):
    """All text of one choice; exactly one chunk must finish it, the last one, without text."""
    chunks = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    assert [chunk["finish_reason"] is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].get("text", "") == "" and chunks[-1].get("delta", {}) == {}
    return "".join(chunk["text"] if "text" in chunk else chunk["delta"].get("content", "") for chunk in chunks)


def said(kind, **fields):
    body = {"model": "tiny", "stream": True, **fields}
    if kind == "chat":
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], **body}
    return "/v1/completions", {"prompt": "hello", **body}


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_all_chunks_share_id_created_model_and_object(bench, kind):
    reply = asyncio.run(bench.post(*said(kind)))
    heads = {tuple(event[name] for name in ("id", "created", "model", "object")) for event in reply.events}
    assert len(heads) == 1
    assert all("finish_reason" in choice for event in reply.events for choice in event["choices"])


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"stop": " wor"}, {"stop": "never seen"}, {"max_tokens": 2}])
def test_a_stream_says_what_the_whole_answer_says(bench, kind, fields):
    path, body = said(kind, **fields)
    streamed = asyncio.run(bench.post(path, body | {"stream_options": {"include_usage": True}})).events
    whole = asyncio.run(bench.post(path, body | {"stream": False})).json
    for choice in whole["choices"]:
        expected = choice["text"] if kind == "completion" else choice["message"]["content"]
        assert text_of(streamed, choice["index"]) == expected
    assert streamed[-1]["usage"] == whole["usage"]


@in_loop
async def test_a_chat_stream_begins_with_the_role(bench):
    events = (await bench.chat(stream=True)).events
    assert [event["choices"][0]["delta"] for event in events] == [
        {"role": "assistant", "content": ""}, {"content": "hello world"}, {},
    ]  # fmt: skip


@in_loop
async def test_every_choice_gets_its_role_and_its_finish(bench):
    events = (await bench.chat(stream=True, n=3)).events
    for index in range(3):
        own = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert sum(choice["finish_reason"] is not None for choice in own) == 1


@in_loop
async def test_an_answer_that_ends_with_its_first_token_is_a_whole_stream(bench):
    bench.core.script = replies(EOS, reason="stop")
    events = (await bench.chat(stream=True)).events
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, "stop"]


@in_loop
async def test_the_wire_holds_data_lines_only_and_says_utf_8(bench):
    reply = await bench.complete(stream=True)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.body.count(b"data: [DONE]\n\n") == 1 and reply.body.endswith(b"data: [DONE]\n\n")
    assert reply.body.isascii()


@pytest.mark.parametrize(
    "text", ["a\nb", "a\r\nb", "a\u2028b", 'data: "x"', "\x85\x0b\x0c", "삼겹살 🦊", "\n\ndata: [DONE]\n\n"]
)
def test_no_text_can_break_a_line(bench, text):
    bench.core.script = replies(*bench.ids(text))
    assert text_of(asyncio.run(bench.complete(stream=True)).events) == text


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_usage_is_not_sent_unless_asked_for(bench, options):
    events = asyncio.run(bench.complete(stream=True, stream_options=options)).events
    assert not any("usage" in event for event in events)
    assert all(event["choices"] for event in events)


@in_loop
async def test_usage_comes_in_one_last_chunk_without_choices(bench):
    events = (await bench.complete(stream=True, n=2, stream_options={"include_usage": True})).events
    assert [bool(event["choices"]) for event in events] == [True] * (len(events) - 1) + [False]
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["usage"]["completion_tokens"] == 4


@in_loop
async def test_phases_are_in_the_last_chunk(bench):
    events = (await bench.complete(stream=True, include_phases=True)).events
    assert [event for event in events if "pdserve" in event] == [events[-1]]
    assert events[-1]["pdserve"]["mode"] == "disaggregated"


@in_loop
async def test_the_mode_is_in_a_header_as_soon_as_it_is_known(bench):
    assert (await bench.complete(stream=True)).headers["x-pdserve-mode"] == "disaggregated"


@in_loop
async def test_tokens_that_arrive_together_are_one_chunk(bench):
    assert len((await bench.complete(stream=True)).events) == 2


@in_loop
async def test_each_chunk_goes_out_before_the_next_token_exists(bench):
    bench.core.script = None
    call = bench.call("POST", *said("completion"))
    await bench.core.arrived.wait()
    for position, item in enumerate(bench.ids("hello world")):
        call.has_bytes.clear()
        bench.core.output(1, [item], first=position)
        await call.has_bytes.wait()
    bench.core.end_sample(1, 2)
    bench.core.end(1)
    assert [event["choices"][0]["text"] for event in (await call.done()).events] == ["hello", " world", ""]


@in_loop
async def test_a_choice_that_has_ended_leaves_the_others_running(bench):
    hello, world = bench.ids("hello world")

    def script(core, submit):
        core.output(submit.ticket, [hello], sample=0)
        core.output(submit.ticket, [world], sample=1)
        core.output(submit.ticket, [world], sample=0, first=1)
        core.output(submit.ticket, [world], sample=1, first=1)
        core.end_sample(submit.ticket, 1, sample=0, reason="stop")
        core.end_sample(submit.ticket, 2, sample=1)
        core.end(submit.ticket)

    bench.core.script = script
    events = (await bench.complete(stream=True, n=2, stop="hello")).events
    assert (text_of(events, 0), text_of(events, 1)) == ("", " world world")


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_log_probabilities_of_a_stream_add_up_to_those_of_the_whole(bench, kind):
    ids = bench.ids("hello world 삼")

    def script(core, submit):
        for position, item in enumerate(ids):
            core.output(submit.ticket, [token(item, -1.0 - position, ((5, -0.25),))], first=position)
        core.end_sample(submit.ticket, len(ids), reason="length")
        core.end(submit.ticket)

    bench.core.script = script
    wanted = {"logprobs": True, "top_logprobs": 1} if kind == "chat" else {"logprobs": 1}
    path, body = said(kind, **wanted)
    streamed = [event["choices"][0]["logprobs"] for event in asyncio.run(bench.post(path, body)).events]
    whole = asyncio.run(bench.post(path, body | {"stream": False})).json["choices"][0]["logprobs"]
    for name in [name for name in whole if whole[name]]:
        assert [entry for chunk in streamed if chunk for entry in chunk[name]] == whole[name]


@in_loop
async def test_token_ids_of_a_stream_add_up(bench):
    events = (await bench.chat(stream=True, return_token_ids=True)).events
    assert [token for event in events for token in event["choices"][0].get("token_ids", [])] == bench.ids("hello world")
    assert events[0]["prompt_token_ids"][0] == 1
    first = (await bench.complete(stream=True, return_token_ids=True)).events[0]["choices"][0]
    assert first["prompt_token_ids"] == bench.ids("hello")


# --- silence ---------------------------------------------------------------------------------------------------------


@in_loop
async def test_silence_is_filled_with_comment_lines(folder):
    made = Bench(folder, ping_interval_s=0.005)
    call = made.call("POST", *said("completion"))
    await call.has_bytes.wait()
    assert (call.reply.status, call.reply.body.replace(b": ping\n\n", b"")) == (200, b"")
    replies(50)(made.core, made.core.submits[0])
    assert len((await call.done()).events) == 2


@in_loop
async def test_nothing_is_sent_before_the_first_event(bench):
    bench.core.script = None
    call = bench.call("POST", *said("completion"))
    await bench.core.arrived.wait()
    await asyncio.sleep(0.01)
    assert call.reply.status == 0
    bench.core.end(1, "failed", status=503, message="why", code="x")
    assert (await call.done()).error["message"] == "why"


# --- errors after the first byte -------------------------------------------------------------------------------------


@in_loop
async def test_a_failure_after_the_first_token_is_one_error_event_and_done(bench):
    def script(core, submit):
        for position in range(5):
            core.output(submit.ticket, [50], first=position)
        asyncio.get_running_loop().call_later(
            0.01, core.end, submit.ticket, "failed",
        )  # fmt: skip

    bench.core.script = script
    reply = await bench.complete(stream=True)
    *chunks, last = reply.events
    assert reply.status == 200
    assert set(last) == {"error"} and set(last["error"]) == {"message", "type", "param", "code"}
    assert not any(choice["finish_reason"] for chunk in chunks for choice in chunk["choices"])


@in_loop
async def test_a_failure_after_a_ping_is_an_error_event(folder):
    made = Bench(folder, ping_interval_s=0.005)
    call = made.call("POST", *said("chat"))
    await call.has_bytes.wait()
    made.core.end(1, "failed", status=503, message="no decode worker", code="no_worker")
    (event,) = (await call.done()).events
    assert (call.reply.status, event["error"]["message"]) == (200, "no decode worker")


@in_loop
async def test_a_core_lost_in_the_middle_is_an_error_event(bench):
    def script(core, submit):
        core.output(submit.ticket, [50])
        asyncio.get_running_loop().call_later(0.01, core.lose)

    bench.core.script = script
    assert (await bench.complete(stream=True)).events[-1]["error"]["code"] == "scheduler_lost"


@in_loop
async def test_tokens_that_came_with_the_failure_are_shown_before_it(bench):
    def script(core, submit):
        core.output(submit.ticket, [50])
        asyncio.get_running_loop().call_later(0.01, rest, core, submit.ticket)

    def rest(core, ticket):
        core.output(ticket, bench.ids("hello"), first=1)
        core.end(ticket, "failed", status=500, message="why")

    bench.core.script = script
    events = (await bench.complete(stream=True)).events
    assert (events[-2]["choices"][0]["text"], events[-1]["error"]["message"]) == ("hello", "why")


# --- clients that leave or stall -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_a_client_that_leaves_a_stream_is_abandoned(bench, kind, num_tokens):
    async def main():
        bench.core.script = None
        call = bench.call("POST", *said(kind, n=3))
        await bench.core.arrived.wait()
        for position in range(num_tokens):
            bench.core.output(1, [50], first=position)
            await call.has_bytes.wait()
        call.leave()
        await call.done()
        assert [message.ticket for message in bench.core.abandoned] == [1]

    asyncio.run(main())


@in_loop
async def test_a_client_that_does_not_read_is_given_up(folder):
    made = Bench(folder, client_stall_timeout_s=0.01)
    made.core.script = lambda core, submit: core.output(submit.ticket, [50])
    call = made.call("POST", *said("completion"))
    call.blocked = asyncio.Event()
    await made.core.was_abandoned.wait()
    await call.done()
    made.check()


@in_loop
async def test_a_client_slower_than_its_buffer_is_given_up(folder):
    made = Bench(folder, client_buffer_kb=1)
    call = made.call("POST", *said("completion", max_tokens=100))
    await made.core.arrived.wait()
    call.blocked = asyncio.Event()
    made.core.output(1, [50])
    await asyncio.sleep(0.01)
    for position in range(1, 100):
        made.core.output(1, [50], first=position)
    call.blocked.set()
    await call.done()
    assert len(made.core.abandoned) == 1
    made.check()
