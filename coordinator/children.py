"""How each child of the supervisor is started, and on which device.

Owns what every process is told; when it is started is the fleet's business. Invariant: a worker that is started again
gets the device it had, and a new one the device that fewest running workers use.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable

from coordinator.fleet import Process
from coordinator.prepare import Prepared
from pdserve import __version__
from pdserve.child import spawn
from pdserve.config import CoreConfig, FrontConfig, WorkerConfig
from pdserve.machine import Device, least_used
from pdserve.options import to_plain


class Children:
    """`starter(kind, name)` gives the function that starts a member of the fleet."""

    def __init__(self, prepared: Prepared, endpoint: str, *, drain_s: float) -> None:
        self._prepared = prepared
        self._endpoint = endpoint
        self._drain_s = drain_s
        self._device_of: dict[str, Device] = {}
        self._processes: dict[str, Process] = {}

    def starter(self, kind: str, name: str) -> Callable[[], Process]:
        if kind == "core":
            return self._start_core
        if kind == "frontend":
            return lambda: self._start_front(name)
        return lambda: self._start_worker(kind, name)

    def _start_core(self) -> Process:
        config = self._prepared.config
        core = CoreConfig(
            core=config.core,
            timeouts=config.timeouts,
            is_colocated=config.is_colocated,
            max_model_len=self._prepared.core_limit,
            landing_share=config.engine.landing_share,
            chunk_tokens=config.engine.chunk_tokens,
            max_batched_tokens=config.engine.max_batched_tokens,
            model_dir=str(self._prepared.model_dir),
            endpoint=self._endpoint,
            run_dir=str(self._prepared.run_dir),
        )
        return spawn("core", to_plain(core))

    def _start_front(self, name: str) -> Process:
        prepared = self._prepared
        front = FrontConfig(
            name=name,
            http=prepared.config.http,
            timeouts=prepared.config.timeouts,
            core_endpoint=self._endpoint,
            listen_fd=prepared.http.fileno(),
            model_dir=str(prepared.model_dir),
            served_names=(prepared.model_name,),
            vocab_size=prepared.spec.vocab_size,
            eos_token_ids=prepared.spec.eos_token_ids,
            max_model_len=prepared.max_model_len,
            max_choices=prepared.config.core.max_queued_requests,
            dtype=prepared.config.engine.dtype,
            decode_weights=prepared.config.engine.decode_weights,
            seed=(prepared.config.core.seed or 0) + int(name.rpartition("-")[2]),
            drain_s=self._drain_s,
        )
        return spawn("frontend", to_plain(front), pass_fds=[prepared.http.fileno()])

    def _start_worker(self, role: str, name: str) -> Process:
        prepared = self._prepared
        device = self._device(name)
        is_gpu = device.name.startswith("cuda")
        asked = prepared.config.engine.max_model_len
        worker = WorkerConfig(
            role=role,  # type: ignore[arg-type]
            name=name,
            device=device.name,
            cores=device.cores,
            coordinator=self._endpoint,
            engine=dataclasses.replace(
                prepared.config.engine, max_model_len=asked if is_gpu else prepared.max_model_len
            ),
            timeouts=prepared.config.timeouts,
            model_dir=str(prepared.model_dir),
            kv_blocks=0 if is_gpu else prepared.kv_blocks,
            memory_share=device.memory_share.get(role, 0.9),
            run_dir=str(prepared.run_dir),
            supervisor_pid=os.getpid(),
        )
        process = self._processes[name] = spawn(role, to_plain(worker), num_threads=max(1, len(device.cores)))
        return process

    def _device(self, name: str) -> Device:
        """The device of a worker: the least used one when it first starts, the same whenever it starts again."""
        if name not in self._device_of:
            used = Counter(device.name for other, device in self._device_of.items() if self._is_running(other))
            self._device_of[name] = least_used(self._prepared.devices.devices, used)
        return self._device_of[name]

    def _is_running(self, name: str) -> bool:
        process = self._processes.get(name)
        return process is not None and process.poll() is None


def description(prepared: Prepared, *, has_workers: bool) -> list[str]:
    pools, engine = prepared.config.pools, prepared.config.engine
    lines = [f"pdserve {__version__}: {prepared.model_name}, {engine.dtype}, context {prepared.max_model_len} tokens"]
    if has_workers:
        size_gb = prepared.kv_blocks * prepared.layout.block_bytes / 1e9
        where = ", ".join(f"{place.role} on {place.device.name}" for place in prepared.devices.placements)
        memory = f"; {prepared.kv_blocks} KV blocks ({size_gb:.2f} GB) each" if prepared.kv_blocks else ""
        lines.append(f"{pools.prefill} prefill and {pools.decode} decode workers: {where}{memory}")
        lines.extend(prepared.devices.notes)
        if prepared.config.is_colocated:
            lines.append("no prefill pool: every request is served colocated, on decode workers")
    return lines
