"""The `pdserve` command: names the commands, and turns every expected error into one line and an exit status.

Owns no behaviour: each command imports what it needs when it runs, so that --help answers at once. Invariant: exit
status 0 is success, 2 is bad arguments or a machine that does not fit them, 1 is failure; no traceback for either.
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from pdserve import __version__
from pdserve.cli_bench import bench
from pdserve.cli_chat import chat
from pdserve.cli_doctor import doctor
from pdserve.cli_flags import serving_command
from pdserve.cli_operate import pools, scale
from pdserve.config import ROLES, ServeConfig, WorkerConfig
from pdserve.errors import ConfigError, ModelError, PDServeError

app = typer.Typer(
    name="pdserve",
    help="Serve large language models with separate prefill and decode pools.",
    epilog="Example: pdserve up --prefill 1 --decode 1 --port 8000",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"pdserve {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    pass


def _late(module: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def up(config: ServeConfig) -> int:
    """Serve on this machine: supervisor, coordinator and both pools.

    Example: pdserve up --prefill 1 --decode 2 --port 8000
    """
    return int(_late("coordinator.supervisor", "run_up")(config))


def coordinator(config: ServeConfig) -> int:
    """Start the coordinator alone; workers join with `pdserve worker`. --prefill 0 makes it colocated.

    Example: pdserve coordinator --control 127.0.0.1:5600
    """
    return int(_late("coordinator.supervisor", "run_coordinator")(config))


def worker(
    config: ServeConfig,
    role: Annotated[str, typer.Option(help="what it computes", metavar="prefill|decode")],
    coordinator: Annotated[str, typer.Option(help="the coordinator's control address", metavar="tcp://HOST:PORT")],
    device: Annotated[str, typer.Option(help="the device it owns: cpu:N or cuda:N")] = "cpu:0",
    name: Annotated[str, typer.Option(help="its name, unique among workers (default: made from role and pid)")] = "",
) -> int:
    """Start one worker by itself; it reconnects whenever its coordinator comes back.

    Example: pdserve worker --role prefill --device cpu:0 --coordinator tcp://127.0.0.1:5600
    """
    from pdserve import child
    from pdserve.options import to_plain

    resolved = worker_config(config, role=role, coordinator=coordinator, device=device, name=name)
    cores = f", cores {','.join(map(str, resolved.cores))}" if resolved.cores else ""
    print(f"{resolved.name}: {role} worker on {resolved.device}{cores}, for {resolved.coordinator}", file=sys.stderr)
    return int(_late(child.KINDS[role], "main")(to_plain(resolved)))


def worker_config(config: ServeConfig, *, role: str, coordinator: str, device: str, name: str) -> WorkerConfig:
    """What a worker started by hand is told; raises `ConfigError`."""
    import os

    from pdserve import machine
    from pdserve.options import host_and_port, is_loopback

    known = next((known for known in ROLES if known == role), None)
    if known is None:
        raise ConfigError(f"--role is {role!r}; it must be one of {', '.join(ROLES)}")
    host, port = host_and_port(coordinator)
    if not is_loopback(host):
        raise ConfigError(f"--coordinator {coordinator} is not loopback; workers carry no keys yet, use 127.0.0.1")
    num_gpus = machine.count_gpus() if device.startswith("cuda") else 0
    place = machine.device_by_hand(device, config.pools, machine.allowed_cores(), num_gpus)
    return WorkerConfig(
        role=known,
        name=name or f"{role}-{os.getpid()}",
        device=place.name,
        cores=place.cores,
        coordinator=f"tcp://{host}:{port}",
        engine=config.engine,
        timeouts=config.timeouts,
        memory_share=place.memory_share.get(role, 0.9),
    )


for _serving in (up, coordinator, worker):
    app.command()(serving_command(_serving))
for _command in (chat, pools, scale, doctor):
    app.command()(_command)
app.add_typer(bench, name="bench")


def run(arguments: Sequence[str] | None = None) -> int:
    """The command line as a function: runs one command, prints at most one line of error, returns the exit status."""
    try:
        status = app(
            args=list(arguments) if arguments is not None else None, prog_name="pdserve", standalone_mode=False
        )
    except typer.TyperException as error:
        return _refuse(error.format_message(), error.exit_code)
    except (ConfigError, ModelError) as error:
        return _refuse(str(error), 2)
    except PDServeError as error:
        return _refuse(str(error), 1)
    except (typer.Abort, KeyboardInterrupt):
        return 130
    return status if isinstance(status, int) else 0


def _refuse(message: str, status: int) -> int:
    text = " ".join(message.split())
    if text:
        print(f"pdserve: {text}", file=sys.stderr)
    return status


def main() -> None:
    """Console script. Unless a command listens for it, SIGTERM unwinds, which ends whatever was started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(run())
