"""`pdserve bench load`: sends planned requests when they are due and reports what became of them.

Owns the run: dispatch, warm-up, and the server it starts when none is named. Invariant: open-loop requests are sent on
schedule whatever the server does; one that the client is too late for is counted as unsent, never sent in a burst.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence

from bench.options import LoadOptions
from bench.report import Report
from bench.serving import first_model, running_server
from bench.stream_client import Server, complete, server
from bench.summary import Sample, summarize
from bench.workload import Planned, plan
from pdserve.terminal import Progress


async def offer(
    target: Server, requests: Sequence[Planned], options: LoadOptions, say: Callable[[str], None]
) -> list[Sample]:
    """Open loop: each request in a task of its own, at its offset from now."""
    start_s = time.perf_counter() + 0.01
    tasks: list[asyncio.Task[Sample]] = []
    samples: list[Sample] = []

    async def one(request: Planned, due_s: float) -> Sample:
        exchange = await complete(target, request.body, options.timeout_s)
        return Sample(due_s=due_s, num_output=request.num_output, exchange=exchange)

    for request in requests:
        due_s = start_s + (request.offset_s or 0.0)
        pause_s = due_s - time.perf_counter()
        if pause_s > 0:
            await asyncio.sleep(pause_s)
        elif -pause_s > options.too_late_s:
            samples.append(Sample(due_s=due_s, num_output=request.num_output, exchange=None))
            continue
        tasks.append(asyncio.create_task(one(request, due_s)))
        say(f"{len(tasks)} of {len(requests)} sent, {sum(task.done() for task in tasks)} answered")
    return samples + list(await asyncio.gather(*tasks))


async def keep_busy(
    target: Server, requests: Sequence[Planned], options: LoadOptions, say: Callable[[str], None]
) -> list[Sample]:
    """Closed loop: a fixed number of requests in flight, each due when its predecessor has ended."""
    samples: list[Sample] = []
    remaining = iter(requests)

    async def client() -> None:
        for request in remaining:
            due_s = time.perf_counter()
            exchange = await complete(target, request.body, options.timeout_s)
            samples.append(Sample(due_s=due_s, num_output=request.num_output, exchange=exchange))
            say(f"{len(samples)} of {len(requests)} answered")

    await asyncio.gather(*(client() for _ in range(min(options.concurrency, len(requests)))))
    return samples


async def measure(options: LoadOptions, target: Server, model: str, say: Callable[[str], None]) -> list[Sample]:
    """Warm up, then run; the garbage collector rests meanwhile."""
    warmup, requests = plan(options, model)
    for request in warmup:
        await complete(target, request.body, options.timeout_s)
    gc.collect()
    gc.disable()
    try:
        if options.arrivals == "closed":
            return await keep_busy(target, requests, options, say)
        return await offer(target, requests, options, say)
    finally:
        gc.enable()


def main(options: LoadOptions) -> int:
    report = Report(options=options.bench)
    with Progress() as progress, running_server(options.bench, options.serve_flags, progress) as base_url:
        target = server(base_url, options.api_key)
        model = options.bench.model if options.bench.base_url is None else asyncio.run(_model(options, target))
        samples = asyncio.run(measure(options, target, model, progress))
    rows, checks = summarize(samples, options.targets_ms)
    for detail in sorted({s.exchange.detail for s in samples if s.exchange is not None and s.exchange.detail})[:5]:
        report.say(f"an answer that was not ok: {detail}")
    report.rows += rows
    report.checks += checks
    return report.finish()


async def _model(options: LoadOptions, target: Server) -> str:
    """The model asked for when the server has it, else the server's first."""
    return await asyncio.to_thread(first_model, target, options.bench.model)
