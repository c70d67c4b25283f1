"""Commands for operators of a running server: what the pools look like, and how large they shall be.

Owns the client side of the admin listener; decides nothing. Invariant: `scale` returns 0 only after every pool it was
given has exactly the size it was given.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from pdserve.config import ROLES, runtime_folder
from pdserve.errors import ConfigError, PDServeError
from pdserve.terminal import Progress, write_json

COLUMNS = ("name", "state", "device", "pid", "epoch", "num_running", "num_placements", "queued_tokens", "blocks")
AdminUrl = Annotated[str | None, typer.Option("--admin", help="admin URL (default: of the only server here)")]
AdminKeyFile = Annotated[Path | None, typer.Option("--admin-key-file", help="file with the admin key")]
Port = Annotated[int | None, typer.Option("--port", help="the server here that serves on this port")]
JsonFile = Annotated[
    str | None, typer.Option("--json", help="write JSON to FILE, - for standard output", metavar="FILE")
]


class Admin:
    """A connection to one server's admin listener."""

    def __init__(self, url: str, key: str) -> None:
        import httpx

        self._client = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=30, trust_env=False
        )

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The answer's JSON; raises `PDServeError` with the server's own words."""
        import httpx

        try:
            answer = self._client.request(method, path, json=body)
            content = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise PDServeError(f"{self._client.base_url} does not answer as an admin listener: {error}") from None
        if answer.is_error:
            message = content.get("error", {}).get("message", "") if isinstance(content, dict) else ""
            kind = ConfigError if answer.status_code in (400, 409) else PDServeError
            raise kind(f"the server refuses ({answer.status_code}): {message or answer.reason_phrase}")
        return content


def connect(url: str | None, key_file: Path | None, port: int | None) -> Admin:
    """The admin listener named by flags, or that of the only live server here; raises `ConfigError`."""
    from pdserve.runtime import the_only_record

    if (url is None) != (key_file is None):
        raise ConfigError("--admin URL and --admin-key-file FILE go together")
    if url is None or key_file is None:
        record = the_only_record(runtime_folder(), port)
        return Admin(record.admin_url, record.admin_key)
    try:
        return Admin(url, key_file.read_text().strip())
    except OSError as error:
        raise ConfigError(f"--admin-key-file {key_file}: {error.strerror or error}") from None


def pools(
    admin: AdminUrl = None, admin_key_file: AdminKeyFile = None, port: Port = None, json: JsonFile = None
) -> None:
    """Show both pools and their workers.

    Example: pdserve pools
    """
    state = connect(admin, admin_key_file, port).ask("GET", "/admin/pools")
    if json is not None:
        write_json(json, state)
    if json != "-":
        print(pools_text(state))


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={_shown(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ",".join(map(_shown, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _heading(column: str) -> str:
    return column.removeprefix("num_").replace("_", " ")


def pools_text(state: dict[str, Any]) -> str:
    """One line per pool, one per worker, columns aligned; --json has every field."""
    lines: list[str] = []
    for role in ROLES:
        pool = state[role]
        lines.append(f"{role}: {pool['actual']} of {pool['desired']}")
        workers: list[dict[str, Any]] = pool.get("workers", [])
        columns = [column for column in COLUMNS if any(column in worker for worker in workers)]
        table = [[_heading(column) for column in columns]] + [
            [_shown(worker.get(column, "")) for column in columns] for worker in workers
        ]
        widths = [max(len(row[index]) for row in table) for index in range(len(columns))]
        for row in table if workers else []:
            lines.append("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return "\n".join(lines)


def wanted_sizes(arguments: list[str]) -> dict[str, int]:
    """`prefill=2 decode=3` as numbers; raises `ConfigError`."""
    wanted: dict[str, int] = {}
    for argument in arguments:
        role, equals, count = argument.partition("=")
        if role not in ROLES or not equals or not count.isdecimal() or role in wanted:
            raise ConfigError(f"{argument!r} is not a pool's size; say each pool once, such as prefill=2 decode=3")
        wanted[role] = int(count)
    return wanted


def scale(
    sizes: Annotated[list[str], typer.Argument(help="prefill=N, decode=M, or both", metavar="POOL=N...")],
    admin: AdminUrl = None,
    admin_key_file: AdminKeyFile = None,
    port: Port = None,
    wait_s: Annotated[float, typer.Option("--wait", help="give up after this many seconds")] = 300.0,
) -> None:
    """Change the size of a pool while it serves, and wait until it is done.

    Example: pdserve scale prefill=2 decode=3
    """
    wanted = wanted_sizes(sizes)
    listener = connect(admin, admin_key_file, port)
    for role, count in wanted.items():
        listener.ask("PUT", f"/admin/pools/{role}", {"replicas": count})
    with Progress() as progress:
        state = wait_for_sizes(lambda: listener.ask("GET", "/admin/pools"), wanted, wait_s, progress)
    print(pools_text(state))


def wait_for_sizes(
    ask: Callable[[], Any],
    wanted: dict[str, int],
    wait_s: float,
    say: Callable[[str], None],
    now_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Any:
    """Ask until each wanted pool has its size and return that answer; raises `PDServeError` after `wait_s`."""
    deadline_s = now_s() + wait_s
    while True:
        state = ask()
        actual = {role: state[role]["actual"] for role in wanted}
        if actual == wanted:
            return state
        changed = [role for role, count in wanted.items() if state[role]["desired"] != count]
        text = ", ".join(f"{role} {actual[role]} of {count}" for role, count in wanted.items())
        if changed:
            raise PDServeError(f"somebody else has scaled {' and '.join(changed)} meanwhile ({text})")
        if now_s() >= deadline_s:
            raise PDServeError(f"not done after {wait_s:g} s: {text}")
        say(text)
        sleep(0.2)
