"""A worker's process from its configuration to its exit status, whatever its role."""

from __future__ import annotations

import secrets
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import zmq

from kv_transfer.offers import export_pool
from pdserve.config import Role, WorkerConfig
from pdserve.options import from_plain
from pdserve.worker.body import Body, Life, start_vitals
from pdserve.worker.control import Control
from pdserve.worker.engine import Engine, build
from pdserve.worker.vitals import Vitals

READ_ROLES: tuple[Role, ...] = ("prefill",)  # whose pools other workers read


class Node(Protocol):
    """The constructor of a role's life."""

    def __call__(
        self, config: WorkerConfig, engine: Engine, vitals: Vitals, *, epoch: str, control: Control, context: Any
    ) -> Life: ...


def run_worker(plain: Mapping[str, Any], node: Node) -> int:
    """Build the engine, then live; raises `ConfigError` or `ModelError` before anything is served."""
    config = from_plain(WorkerConfig, plain)
    own_folder = "" if config.run_dir else tempfile.mkdtemp(prefix="pdserve-worker-")
    config = replace(
        config,
        name=config.name or f"{config.role}-{secrets.token_hex(3)}",
        run_dir=config.run_dir or own_folder,
    )
    try:
        vitals = start_vitals(config)
        engine = build(config)
        exports = export_pool(
            engine.pool,
            kinds=config.engine.kv_link if config.role in READ_ROLES else "none",
            folder=Path(config.run_dir),
            reader_pid=config.supervisor_pid,
        )
        for note in exports.notes:
            print(f"{config.name}: {note}", file=sys.stderr, flush=True)
        body = Body(config, engine, exports, vitals)

        def start(epoch: str, control: Control, context: zmq.Context[Any]) -> Life:
            return node(config, engine, vitals, epoch=epoch, control=control, context=context)

        status = body.run(start)
        exports.close()
        return status
    finally:
        if own_folder:
            shutil.rmtree(own_folder, ignore_errors=True)
