"""Tickets, open requests, and what happens when one side goes away."""

import asyncio

import pytest
from front_kit import FakeCore, ended, in_loop, token

from coordinator.frontend.client import CoreClient, PoolLimit
from coordinator.frontend.envelope import ClientLeftError, ServiceError
from coordinator.frontend.live import ClientTooSlowError
from pdserve.messages import Ended, Output, SampleEnded, Submit
from pdserve.request import Sampling


def submit():
    return Submit(
        ticket=0, prompt=(1,), sampling=Sampling(max_tokens=5), stop=(), priority=0, tenant="", salt="",
        received_ns=0, timeout_s=1.0,
    )  # fmt: skip


def connected(**changes):
    core = FakeCore()
    return core, CoreClient(core.connect, **({"max_buffer_bytes": 1_000_000} | changes))


@in_loop
async def test_events_come_in_order_until_the_end():
    core, client = connected()
    async with client.open([submit()]) as live:
        core.output(1, [5])
        core.end_sample(1, 1)
        core.end(1)
        events = [event for _, event in await live.take(1.0)]
        assert live.is_over
    assert [type(event) for event in events] == [Output, SampleEnded, Ended]
    assert core.abandoned == [] and client.num_open == 0


@in_loop
async def test_a_request_that_is_left_before_its_end_is_abandoned_once():
    core, client = connected()
    with pytest.raises(ClientLeftError):
        async with client.open([submit()]):
            raise ClientLeftError("the client left")
    assert [(message.ticket, message.reason) for message in core.abandoned] == [(1, "the client left")]
    assert client.num_open == 0


@in_loop
async def test_a_cancelled_task_abandons_its_request():
    core, client = connected()

    async def wait():
        async with client.open([submit()]) as live:
            await live.take(100)

    task = asyncio.create_task(wait())
    await core.arrived.wait()
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(core.abandoned) == 1


@in_loop
async def test_tickets_are_never_used_twice():
    core, client = connected()
    for _ in range(3):
        async with client.open([submit(), submit()]):
            pass
    assert [message.ticket for message in core.submits] == [1, 2, 3, 4, 5, 6]


@in_loop
async def test_several_prompts_are_told_apart():
    core, client = connected()
    async with client.open([submit(), submit()]) as live:
        core.end(2)
        core.end(1)
        assert [prompt for prompt, _ in await live.take(1.0)] == [1, 0]


@in_loop
async def test_only_prompts_that_have_not_ended_are_abandoned():
    core, client = connected()
    async with client.open([submit(), submit()]):
        core.end(1)
    assert [message.ticket for message in core.abandoned] == [2]


@in_loop
async def test_tokens_that_came_together_are_taken_together():
    core, client = connected()
    async with client.open([submit()]) as live:
        for position in range(3):
            core.output(1, [5], first=position)
        assert len(await live.take(1)) == 3


@in_loop
async def test_silence_gives_nothing_after_a_while():
    _, client = connected()
    async with client.open([submit()]) as live:
        assert await live.take(0.001) == []


@in_loop
async def test_messages_for_nobody_change_nothing():
    core, client = connected()
    core.end(99)
    core.output(99, [5])
    core.say(submit())
    assert client.num_open == 0


@in_loop
async def test_a_full_queue_refuses_at_once():
    core, client = connected()
    core.is_full = True
    with pytest.raises(ServiceError) as caught:
        async with client.open([submit()]):
            pass
    assert (caught.value.status, client.num_open) == (503, 0)


@in_loop
async def test_prompts_sent_before_the_queue_was_full_are_abandoned():
    core, client = connected()
    core.script = None
    second = core.send

    def one_only(message):
        return second(message) if not core.submits or not isinstance(message, Submit) else False

    core.send = one_only
    with pytest.raises(ServiceError):
        async with client.open([submit(), submit()]):
            pass
    assert [message.ticket for message in core.abandoned] == [1]


@in_loop
async def test_without_a_core_nothing_is_sent():
    core, client = connected()
    core.is_connected = False
    with pytest.raises(ServiceError):
        async with client.open([submit()]):
            pass
    assert core.submits == []


@in_loop
async def test_when_the_core_is_replaced_open_requests_end_in_an_error():
    core, client = connected()
    with pytest.raises(ServiceError) as caught:
        async with client.open([submit()]) as live:
            core.lose()
            await live.take(1)
    assert (caught.value.status, caught.value.code) == (503, "scheduler_lost")
    assert core.abandoned == [] and client.num_open == 0


@in_loop
async def test_a_client_slower_than_its_buffer_is_given_up():
    core, client = connected(max_buffer_bytes=1000)
    with pytest.raises(ClientTooSlowError):
        async with client.open([submit()]) as live:
            for position in range(100):
                core.output(1, [5], first=position)
            await live.take(1)
    assert len(core.abandoned) == 1


@in_loop
async def test_taking_makes_room_in_the_buffer():
    core, client = connected(max_buffer_bytes=1000)
    async with client.open([submit()]) as live:
        for position in range(500):
            core.output(1, [token(5, -1.0, ((5, -1.0),) * 5)], first=position)
            assert len(await live.take(1)) == 1
        core.say(ended(1))


@in_loop
async def test_an_abandonment_that_finds_the_queue_full_is_sent_later():
    core, client = connected()
    async with client.open([submit()]):
        core.is_full = True
    assert core.abandoned == []
    core.is_full = False
    await core.was_abandoned.wait()
    assert len(core.abandoned) == 1


@in_loop
async def test_stop_notices_go_out_for_open_requests_only():
    core, client = connected()
    client.stop_found(1, 0, 5)
    async with client.open([submit()]):
        client.stop_found(1, 2, 5)
    assert [(stop.ticket, stop.sample, stop.num_generated) for stop in core.stops] == [(1, 2, 5)]


@in_loop
async def test_a_probe_goes_to_the_core_and_back():
    _, client = connected()
    assert (await client.probe(1)).is_ready


@in_loop
async def test_a_probe_without_an_answer_ends_by_its_deadline():
    core, client = connected()
    core.answers_probes = False
    with pytest.raises(ServiceError, match="did not answer"):
        await client.probe(0.01)


@in_loop
async def test_a_probe_ends_when_the_core_is_lost():
    core, client = connected()
    core.answers_probes = False
    asyncio.get_running_loop().call_soon(core.lose)
    with pytest.raises(ServiceError):
        await client.probe(10)


@in_loop
async def test_the_pools_limit_is_learned_and_lowers_the_model_s():
    core, client = connected()
    core.pools = {"max_request_tokens": 96}
    limit = PoolLimit(client, max_age_s=10, now_s=lambda: 0.0)
    assert limit.within(128) == 128
    await limit._task
    assert (limit.within(128), limit.within(64)) == (96, 64)


@pytest.mark.parametrize("pools", [{}, {"max_request_tokens": None}, {"max_request_tokens": "96"}, [], 5])
def test_pools_that_state_no_limit_leave_the_model_s(pools):
    async def main():
        core, client = connected()
        core.pools = pools
        limit = PoolLimit(client, max_age_s=10, now_s=lambda: 0.0)
        await limit.refresh()
        assert limit.within(128) == 128

    asyncio.run(main())
