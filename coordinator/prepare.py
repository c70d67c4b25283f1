"""Everything `pdserve up` decides before it starts a process: model, pool sizes, devices, sockets, folders.

Owns start-up checks, so that whatever is wrong is one line and exit status 2 with nothing left behind. Invariant: what
children are told (blocks, length limit, cores) was worked out once, here.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pdserve.config import ServeConfig, cache_folder, runtime_folder
from pdserve.errors import ConfigError
from pdserve.layout import KVLayout
from pdserve.machine import (
    DevicePlan,
    allowed_cores,
    available_memory_bytes,
    count_gpus,
    plan_devices,
    pool_blocks,
)
from pdserve.model.spec import ModelSpec, read_spec
from pdserve.model.store import resolve, served_name
from pdserve.options import host_and_port
from pdserve.runtime import private_folder, started_ticks


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    config: ServeConfig
    model_dir: Path
    model_name: str  # as served
    spec: ModelSpec
    layout: KVLayout
    kv_blocks: int  # per worker on CPU cores, 0 if there is none; on a GPU the worker decides
    max_model_len: int
    devices: DevicePlan
    run_dir: Path
    http: socket.socket
    admin: socket.socket

    @property
    def core_limit(self) -> int:
        """The context limit that the core holds requests to; 0: the least that a live worker states."""
        if self.kv_blocks and not any(place.device.name.startswith("cuda") for place in self.devices.placements):
            return self.max_model_len
        return self.config.engine.max_model_len or 0

    @property
    def base_url(self) -> str:
        host, port = self.http.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin.getsockname()[1]}"

    def close(self) -> None:
        self.http.close()
        self.admin.close()
        shutil.rmtree(self.run_dir, ignore_errors=True)


def prepare(config: ServeConfig, *, has_workers: bool, say: Callable[[str], None]) -> Prepared:
    """Resolve everything; raises `ConfigError` or `ModelError`. The caller closes what comes back."""
    http = listen(config.http.host, config.http.port, "--port")
    admin = listen("127.0.0.1", config.http.admin_port, "--admin-port")
    try:
        check_free(config.core.control)
        if config.http.ready_file is not None:
            check_writable(Path(config.http.ready_file), "--ready-file")
        model_dir = resolve(config.engine.model, cache_dir=cache_folder() / "models", say=say)
        spec = read_spec(model_dir)
        devices = plan_devices(config.pools, allowed_cores(), _usable_gpus(config, say))
        config = with_block_size(config, devices)
        layout = spec.kv_layout(dtype=config.engine.dtype, block_size=config.engine.block_size_on(""))
        num_on_cpu = sum(not place.device.name.startswith("cuda") for place in devices.placements)
        kv_blocks = 0
        if has_workers and num_on_cpu:
            kv_blocks = pool_blocks(config.engine, layout, available_memory_bytes(), num_on_cpu)
        return Prepared(
            config=config,
            model_dir=model_dir,
            model_name=config.http.served_model_name or served_name(config.engine.model),
            spec=spec,
            layout=layout,
            kv_blocks=kv_blocks,
            max_model_len=longest(config.engine.max_model_len, spec, layout, kv_blocks),
            devices=devices,
            run_dir=make_run_dir(),
            http=http,
            admin=admin,
        )
    except BaseException:
        http.close()
        admin.close()
        raise


def _usable_gpus(config: ServeConfig, say: Callable[[str], None]) -> int:
    """GPUs are used only where --devices names them, for as long as no GPU has run this."""
    num_gpus = count_gpus()
    if num_gpus and config.pools.devices is None:
        say(f"{num_gpus} GPUs are here and not used: nothing has been tested on one yet; --devices cuda:0 tries")
        return 0
    return num_gpus


def with_block_size(config: ServeConfig, devices: DevicePlan) -> ServeConfig:
    """The same for all workers, since blocks move between them: that of a GPU only where every worker has one."""
    kinds = {place.device.name.partition(":")[0] for place in devices.placements}
    size = config.engine.block_size_on("cuda" if kinds == {"cuda"} else "cpu")
    return dataclasses.replace(config, engine=dataclasses.replace(config.engine, block_size=size))


def longest(asked: int | None, spec: ModelSpec, layout: KVLayout, kv_blocks: int) -> int:
    """The context limit: what was asked, the model's, at most what a pool holds. Raises `ConfigError`."""
    if asked is not None and asked > spec.max_positions:
        raise ConfigError(f"--max-model-len is {asked}; the model's limit is {spec.max_positions}")
    limit = asked or spec.max_positions
    return min(limit, (kv_blocks - 1) * layout.block_size) if kv_blocks else limit


def listen(host: str, port: int, flag: str) -> socket.socket:
    """A listening socket; raises `ConfigError` when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((host.strip("[]"), port))
        server.listen(2048)
    except OSError as error:
        server.close()
        raise ConfigError(
            f"{flag} {port} on {host}: {error.strerror or error}; choose another, or 0 for a free one"
        ) from None
    return server


def check_free(control: str) -> None:
    """The core binds it later, in its own process; raises `ConfigError` when it is taken."""
    host, port = host_and_port(control)
    listen(host, port, "--control").close()


def check_writable(path: Path, flag: str) -> None:
    """Raises `ConfigError` when no file can be put there."""
    draft = Path(f"{path}.{os.getpid()}")
    try:
        draft.touch()
        draft.unlink()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror or error}") from None
    if path.is_dir():
        raise ConfigError(f"{flag} {path} is a folder")


def short_folder(folder: Path) -> Path:
    """`folder`, or one under /tmp where Unix sockets in it would exceed the 107 bytes that the kernel allows."""
    return folder if len(os.fsencode(folder)) <= 40 else Path(f"/tmp/pdserve-{os.getuid()}")


def make_run_dir() -> Path:
    """A folder for this server's Unix sockets; those of servers that were killed are removed on the way."""
    base = private_folder(short_folder(runtime_folder()))
    for old in base.glob("run-*-*"):
        _, pid, ticks = old.name.split("-", 2)
        if pid.isdecimal() and str(started_ticks(int(pid))) != ticks.partition("-")[0]:
            shutil.rmtree(old, ignore_errors=True)
    path = base / f"run-{os.getpid()}-{started_ticks(os.getpid())}-{secrets.token_hex(2)}"
    path.mkdir(mode=0o700)
    return path
