import asyncio

import pytest
import zmq

from coordinator.corelink import AsyncCoreLink
from pdserve.channel import Hub, new_epoch
from pdserve.messages import FrontHello, Ping, Pong


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


async def serve(hub, got, stop):
    """Answer each ping; the hub's side of the wire."""
    while not stop.is_set():
        for peer, message, _ in hub.receive():
            got.append(message)
            if isinstance(message, Ping):
                hub.send(peer, Pong(nonce=message.nonce))
        hub.tick()
        await asyncio.sleep(0.002)


async def wait_for(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


def test_a_core_link_greets_talks_and_starts_again_with_a_new_core(context, tmp_path):
    async def scenario():
        endpoint, got, answers, lost = f"ipc://{tmp_path}/core", [], [], []
        link = AsyncCoreLink(
            endpoint,
            hello=FrontHello(name="f"),
            on_message=answers.append,
            on_lost=lambda: lost.append(True),
        )
        for life in (1, 2):
            stop = asyncio.Event()
            hub = Hub(context, endpoint, new_epoch())
            server = asyncio.create_task(serve(hub, got, stop))
            if life == 1:
                link.start()
            await wait_for(lambda life=life: got.count(FrontHello(name="f")) == life)
            await wait_for(lambda life=life: link.send(Ping(nonce=life)))
            await wait_for(lambda life=life: Pong(nonce=life) in answers)
            stop.set()
            await server
            hub.close()
        assert lost == [True]
        link.close()

    asyncio.run(scenario())
