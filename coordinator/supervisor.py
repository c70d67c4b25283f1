"""The parent of all processes of `pdserve up`: starts, replaces, scales and ends them.

Owns the children, the HTTP socket they share, the operators' listener and our runtime record; decides nothing
about requests. Invariant: when it ends, however it ends, no child outlives it and nothing is left but its dead record.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn

from coordinator.admin import create_app
from coordinator.children import Children, description
from coordinator.corelink import AsyncCoreLink
from coordinator.fleet import Ended, Fleet
from coordinator.frontend.server import QuietServer
from coordinator.prepare import Prepared, prepare
from pdserve.config import ROLES, ServeConfig, runtime_folder
from pdserve.errors import ConfigError
from pdserve.messages import (
    DrainWorker,
    Probe,
    ProbeReply,
    Query,
    QueryReply,
    SupervisorHello,
    WorkerGone,
    WorkerState,
)
from pdserve.runtime import RuntimeRecord, remove_record, started_ticks, write_record

TICK_S = 0.5  # beside the signal that tells of an ended child
PROBE_EVERY_S = 0.2
QUERY_DEADLINE_S = 5.0
DRAIN_DEADLINE_S = 5.0  # for open streams, on SIGTERM
HOPELESS_DEATHS = 3  # of one member in a row, before we were ever ready


def run_up(config: ServeConfig) -> int:
    """Supervisor, core, front ends and both pools on this machine, until SIGTERM or SIGINT; the exit status."""
    return _run(config, has_workers=True)


def run_coordinator(config: ServeConfig) -> int:
    """Supervisor, core and front ends; workers are started by hand with `pdserve worker`."""
    return _run(config, has_workers=False)


def _run(config: ServeConfig, *, has_workers: bool) -> int:
    started_s = time.monotonic()
    prepared = prepare(config, has_workers=has_workers, say=_say)
    try:
        return asyncio.run(Supervisor(prepared, has_workers=has_workers, started_s=started_s).run())
    finally:
        prepared.close()


class Supervisor:
    def __init__(self, prepared: Prepared, *, has_workers: bool, started_s: float) -> None:
        self._prepared = prepared
        self._has_workers = has_workers
        self._started_s = started_s
        self._endpoint = f"ipc://{prepared.run_dir}/core"
        self._fleet = Fleet(Children(prepared, self._endpoint, drain_s=DRAIN_DEADLINE_S).starter)
        self._link = AsyncCoreLink(
            self._endpoint,
            hello=SupervisorHello(),
            on_message=self._on_message,
            on_lost=self._on_core_lost,
        )
        self._nonces = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._stop = asyncio.Event()
        self._wake = asyncio.Event()  # a child has ended, or it is time to stop
        self._exit_status = 0
        self._was_ready = False

    # life

    async def run(self) -> int:
        self._link.start()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        loop.add_signal_handler(signal.SIGCHLD, self._wake.set)
        key = secrets.token_urlsafe(32)
        admin = _admin_server(create_app(self, key))
        tasks = [
            asyncio.create_task(admin.serve(sockets=[self._prepared.admin])),
            asyncio.create_task(self._announce(key)),
        ]
        self._start_children()
        try:
            await self._watch()
        finally:
            admin.should_exit = True
            tasks[1].cancel()
            await self._end_children()
            await asyncio.gather(*tasks, return_exceptions=True)
            remove_record(runtime_folder(), self._prepared.http.getsockname()[1], os.getpid())
            self._link.close()
        return self._exit_status

    def _start_children(self) -> None:
        now_s = time.monotonic()
        self._fleet.add("core", "core", now_s)
        if self._has_workers:
            self._fleet.scale("prefill", self._prepared.config.pools.prefill, now_s)
            self._fleet.scale("decode", self._prepared.config.pools.decode, now_s)
        for number in range(self._prepared.config.http.api_workers):
            self._fleet.add("frontend", f"frontend-{number}", now_s)

    async def _watch(self) -> None:
        while not self._stop.is_set():
            for ended in self._fleet.tick(time.monotonic()):
                self._on_ended(ended)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), TICK_S)
            self._wake.clear()

    async def _end_children(self) -> None:
        """Front ends first, so that open streams can finish; then everybody; then whoever did not listen."""
        self._fleet.stop_restarting()
        for kinds, number, deadline_s in (
            (("frontend",), signal.SIGTERM, DRAIN_DEADLINE_S + 1.0),
            (("core", *ROLES), signal.SIGTERM, 2.0),
            (("frontend", "core", *ROLES), signal.SIGKILL, 2.0),
        ):
            members = [member for member in self._fleet.members.values() if member.kind in kinds]
            for member in members:
                if member.process is not None and member.process.poll() is None:
                    member.process.send_signal(number)
            end_s = time.monotonic() + deadline_s
            while time.monotonic() < end_s and any(member.process is not None for member in members):
                self._fleet.tick(time.monotonic())
                await asyncio.sleep(0.02)

    def _on_signal(self) -> None:
        if self._stop.is_set():  # a second signal: no more patience
            self._fleet.signal_all(signal.SIGKILL)
        self._end()

    def _end(self) -> None:
        self._stop.set()
        self._wake.set()

    def _on_ended(self, ended: Ended) -> None:
        member = ended.member
        if member.kind in (*ROLES, "frontend"):
            self._link.send(WorkerGone(worker=member.name, epoch="", reason=ended.reason))
        if member.is_leaving:
            return
        if not self._was_ready and (ended.code == 2 or member.quick_deaths >= HOPELESS_DEATHS):
            if ended.code != 2:
                _say(f"{member.name} ended {member.quick_deaths} times before serving ({ended.reason}); giving up")
            self._exit_status = 2 if ended.code == 2 else 1
            self._end()
            return
        _say(f"{member.name} has ended ({ended.reason}); starting it again")

    # the core

    def _on_message(self, message: Any) -> None:
        if isinstance(message, ProbeReply | QueryReply):
            answer = self._answers.pop(message.nonce, None)
            if answer is not None and not answer.done():
                answer.set_result(message)
        elif isinstance(message, WorkerState):
            if message.state == "ready":
                self._fleet.recovered(message.worker)
                if self._fleet.is_leaving(message.worker):  # it was still loading when it was told
                    self._link.send(DrainWorker(worker=message.worker))
            elif message.state == "suspect":
                _say(f"{message.worker} is suspect: {message.reason}")
                hang_timeout_s = self._prepared.config.timeouts.hang_timeout_s
                self._fleet.suspect(message.worker, time.monotonic() + hang_timeout_s)

    def _on_core_lost(self) -> None:
        for answer in self._answers.values():
            answer.cancel()
        self._answers.clear()

    async def _ask(self, make: Callable[[int], Any], deadline_s: float) -> Any:
        """A question to the core; None when it does not answer in time."""
        nonce = next(self._nonces)
        answer = self._answers[nonce] = asyncio.get_running_loop().create_future()
        self._link.send(make(nonce))
        await asyncio.wait([answer], timeout=deadline_s)
        self._answers.pop(nonce, None)
        return answer.result() if answer.done() and not answer.cancelled() else None

    async def _announce(self, admin_key: str) -> None:
        """Say where we listen once a request would be served."""
        port = self._prepared.http.getsockname()[1]
        record = RuntimeRecord(
            base_url=self._prepared.base_url,
            admin_url=self._prepared.admin_url,
            admin_key=admin_key,
            pid=os.getpid(),
            started_ticks=started_ticks(os.getpid()) or 0,
        )
        write_record(runtime_folder(), port, record)
        for line in description(self._prepared, has_workers=self._has_workers):
            _say(line)
        while not await self._is_ready():
            await asyncio.sleep(PROBE_EVERY_S)
        self._was_ready = True
        _say(f"ready after {time.monotonic() - self._started_s:.1f} s: {self._prepared.base_url}/v1")
        if not self._has_workers:
            reply = await self._ask(lambda nonce: Query(nonce=nonce, what="pools"), QUERY_DEADLINE_S)
            control = json.loads(reply.body).get("control") if isinstance(reply, QueryReply) else "?"
            _say(f"more workers connect to {control}")
        _say(f'try it:  pdserve chat "What is a KV cache?"   or any OpenAI client, model {self._prepared.model_name}')
        ready_file = self._prepared.config.http.ready_file
        if ready_file is not None:
            draft = Path(f"{ready_file}.{os.getpid()}")
            draft.write_text(self._prepared.base_url + "\n")
            draft.replace(ready_file)

    async def _is_ready(self) -> bool:
        reply = await self._ask(lambda nonce: Probe(nonce=nonce), 2.0)
        if not isinstance(reply, ProbeReply) or not reply.is_ready:
            return False
        try:
            async with asyncio.timeout(2.0):
                _, writer = await asyncio.open_connection(*self._prepared.http.getsockname()[:2])
                writer.close()
        except (OSError, TimeoutError):
            return False
        return all(member.process is not None for member in self._fleet.of("frontend"))

    # Operator

    async def pools(self) -> dict[str, Any]:
        reply = await self._ask(lambda nonce: Query(nonce=nonce, what="pools"), QUERY_DEADLINE_S)
        pools: dict[str, Any] = json.loads(reply.body) if isinstance(reply, QueryReply) else {}
        for role in ROLES:
            pool = pools.setdefault(role, {"workers": []})
            pool["desired"] = self._fleet.desired.get(role, len(pool["workers"]))
            pool["actual"] = len(pool["workers"])
            known = {worker["name"] for worker in pool["workers"]}
            starting = [member for member in self._fleet.of(role) if member.process and member.name not in known]
            pool["workers"] += [{"name": each.name, "state": "starting", "pid": each.pid} for each in starting]
        pools["processes"] = {member.name: member.pid for member in self._fleet.members.values()}
        return pools

    async def requests(self) -> list[Any]:
        reply = await self._ask(lambda nonce: Query(nonce=nonce, what="requests"), QUERY_DEADLINE_S)
        return list(json.loads(reply.body)) if isinstance(reply, QueryReply) else []

    async def scale(self, role: str, replicas: int) -> dict[str, Any]:
        if not self._has_workers:
            raise ConfigError("the workers of this coordinator are started by hand; start or end them where they run")
        if role == "prefill" and self._prepared.config.is_colocated != (replicas == 0):
            raise ConfigError(
                f"{'0' if replicas == 0 else 'more'} prefill workers would change the mode every request is served in; "
                "restart with --prefill N"
            )
        if replicas == 0:
            raise ConfigError(f"the {role} pool cannot be scaled to 0; 1 is the least")
        for member in self._fleet.scale(role, replicas, time.monotonic()):
            self._link.send(DrainWorker(worker=member.name))
        return await self.pools()


def _admin_server(app: Any) -> uvicorn.Server:
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    return QuietServer(config)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
