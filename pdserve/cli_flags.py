"""The serving flags as command line options, made from the one flag table.

Owns how a flag looks on a terminal; names, defaults and checks are `options.py`'s. Invariant: every command that serves
knows exactly the flags of the table, and `--config FILE` beside them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from pdserve.config import ServeConfig
from pdserve.options import Flag, flag_table, read_file, resolve

PANELS = {
    "http": "HTTP",
    "engine": "Workers",
    "core": "Coordinator",
    "timeouts": "Timeouts (seconds)",
    "pools": "Pools and devices",
}
_METAVARS = {int: "N", float: "X", str: "TEXT"}


def _option(row: Flag) -> inspect.Parameter:
    name = f"--{row.name}"
    declaration = f"{name}/--no-{row.name}" if row.kind is bool else name
    limit = f"; at the limit: {row.limit}" if row.limit else ""
    about = typer.Option(
        declaration,
        help=f"{row.help} (default {row.shown}{limit})",
        metavar=None if row.kind is bool else "|".join(row.choices) or _METAVARS[row.kind],
        rich_help_panel=PANELS[row.section],
        show_default=False,
    )
    return inspect.Parameter(
        row.name.replace("-", "_"),
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[row.kind | None, about],
    )


def _config_option() -> inspect.Parameter:
    about = typer.Option("--config", help="TOML file with these flags by name; flags win", metavar="FILE")
    return inspect.Parameter(
        "config_file", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, about]
    )


def serving_command(function: Callable[..., int]) -> Callable[..., None]:
    """Make `function(config, **own)` a command with its own parameters, --config, and all serving flags.

    What it returns becomes the exit status. Raises `ConfigError` before `function` runs.
    """
    rows = {row.name.replace("-", "_"): row for row in flag_table()}
    own = [p for name, p in inspect.signature(function, eval_str=True).parameters.items() if name != "config"]

    def command(**given: Any) -> None:
        flags = {row.name: given.pop(name) for name, row in rows.items()}
        path: Path | None = given.pop("config_file")
        config: ServeConfig = resolve(flags, read_file(path) if path is not None else None)
        raise typer.Exit(function(config, **given))

    command.__name__ = function.__name__
    command.__doc__ = function.__doc__
    command.__annotations__ = {}
    options = [_config_option(), *(_option(row) for row in rows.values())]
    command.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
    return command
