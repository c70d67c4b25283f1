"""Many requests, a third of them cancelled at any moment: nothing is left, and nobody else's text changes."""

import asyncio
import random

import httpx
import psutil
from system_kit import wait_until

NUM_REQUESTS = 500
CANCELLED = 0.3


def prompt_of(number):
    lengths = random.Random(number)
    return [(number * 31 + 7 * at) % 190 + 3 for at in range(lengths.randint(1, 200))]


async def one(client, model, number, reference):
    """One request; cancelled at a random moment, or compared with what its prompt gave alone."""
    dice = random.Random(1000 + number)
    body = {
        "model": model,
        "prompt": prompt_of(number % 40),
        "max_tokens": 24,
        "temperature": 0,
        "return_token_ids": True,
        "stream": dice.random() < 0.5,
    }
    patience_s = dice.uniform(0.0, 0.6) if dice.random() < CANCELLED else 60.0
    body["max_tokens"] = 200 if patience_s < 60 else 24
    try:
        async with asyncio.timeout(patience_s), client.stream("POST", "/v1/completions", json=body) as answer:
            raw = await answer.aread()
    except TimeoutError:
        return "cancelled"
    if patience_s < 60:
        return "cancelled"
    assert answer.status_code == 200, raw
    if not body["stream"]:
        assert answer.json()["choices"][0]["token_ids"] == reference[number % 40], number
    else:
        assert raw.endswith(b"data: [DONE]\n\n") and b'"error"' not in raw, raw[-500:]
    return "finished"


async def storm(server, reference):
    limits = httpx.Limits(max_connections=None)
    gate = asyncio.Semaphore(24)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:

        async def gated(number):
            async with gate:
                return await one(client, server.model, number, reference)

        return await asyncio.gather(*(gated(number) for number in range(NUM_REQUESTS)))


def test_nothing_leaks_when_a_third_of_the_clients_leave(server):
    reference = {
        number: server.complete(prompt=prompt_of(number), max_tokens=24)["choices"][0]["token_ids"]
        for number in range(40)
    }
    server.expect_clean()
    pids = server.pools()["processes"]
    before = descriptors(pids)
    outcomes = asyncio.run(storm(server, reference))
    assert 0.2 < outcomes.count("cancelled") / NUM_REQUESTS < 0.4
    assert outcomes.count("finished") == NUM_REQUESTS - outcomes.count("cancelled")
    server.expect_clean(pids)
    assert server.complete(prompt=prompt_of(3), max_tokens=24)["choices"][0]["token_ids"] == reference[3]
    wait_until(lambda: descriptors(pids) <= before + 8, f"descriptors fall back to {before}")
    assert server.total("pdserve_leases_expired_total") == 0


def descriptors(pids):
    return sum(psutil.Process(pid).num_fds() for pid in pids.values())
