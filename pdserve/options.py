"""From flags and a TOML file to one resolved `ServeConfig`, and configs to plain dictionaries and back.

Owns the flag table (read off the dataclasses of `config.py`), precedence and validation; reads no environment.
Invariant: what comes out obeys every bound and contradicts itself nowhere; anything else is a one-line `ConfigError`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import ipaddress
import math
import secrets
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pdserve.config import ROLES, ServeConfig
from pdserve.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One row of the flag table; `section` and `field` say where its value lives in a `ServeConfig`."""

    name: str  # as in TOML; the command line adds two dashes
    section: str
    field: str
    kind: type[bool] | type[int] | type[float] | type[str]
    default: Any
    help: str
    low: float | None
    high: float | None
    choices: tuple[str, ...]
    shown: str  # the default, as a document says it
    limit: str  # what happens at the limit


def _shown(default: Any, shown: str | None) -> str:
    if shown is not None:
        return shown
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default)


@functools.cache
def flag_table() -> tuple[Flag, ...]:
    """Every serving flag, in the order of the sections."""
    rows: list[Flag] = []
    for section, cls in typing.get_type_hints(ServeConfig).items():
        hints = typing.get_type_hints(cls)
        for item in dataclasses.fields(cls):
            kinds = [
                kind for kind in (typing.get_args(hints[item.name]) or (hints[item.name],)) if kind is not type(None)
            ]
            about = dict(item.metadata)
            about["shown"] = _shown(item.default, about["shown"])
            name = item.name.removesuffix("_s").replace("_", "-")
            rows.append(Flag(name=name, section=section, field=item.name, kind=kinds[0], default=item.default, **about))
    return tuple(rows)


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    return near[0] if near else names[0]


def checked_value(row: Flag, value: Any, origin: str) -> Any:
    """`value` with the row's type and bounds, or a `ConfigError` that says what would be right."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = is_number if row.kind is float else type(value) is row.kind
    if not fits:
        names = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
        raise ConfigError(f"{origin} is {value!r}; it must be {names[row.kind]}")
    if row.kind is float:
        value = float(value)
        if not math.isfinite(value):
            raise ConfigError(f"{origin} is {value}; it must be finite")
    if row.choices and value not in row.choices:
        raise ConfigError(f"{origin} is {value!r}; it must be one of {', '.join(row.choices)}")
    if row.low is not None and value < row.low:
        raise ConfigError(f"{origin} is {value}; it must be at least {row.low}")
    if row.high is not None and value > row.high:
        raise ConfigError(f"{origin} is {value}; it must be at most {row.high}")
    return value


def read_file(path: Path) -> dict[str, Any]:
    """The keys of a TOML config file, types and bounds checked; unknown keys are errors."""
    try:
        body = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not TOML: {error}") from None
    rows = {row.name: row for row in flag_table()}
    for key in body:
        if key not in rows:
            raise ConfigError(f"--config {path}: unknown key {key!r}; the nearest is {_nearest(key, list(rows))!r}")
    return {key: checked_value(rows[key], value, f"--config {path}: {key}") for key, value in body.items()}


def resolve(flags: Mapping[str, Any], file: Mapping[str, Any] | None = None) -> ServeConfig:
    """The config for `flags` (by flag name, None: not given) over `file` over the defaults.

    Draws the seed when none is given. Raises `ConfigError`.
    """
    given = dict(file or {})
    rows = {row.name: row for row in flag_table()}
    for name, value in flags.items():
        if value is not None:
            given[name] = checked_value(rows[name], value, f"--{name}")
    values: dict[str, dict[str, Any]] = {}
    for name, value in given.items():
        values.setdefault(rows[name].section, {})[rows[name].field] = value
    sections = {section: cls(**values.get(section, {})) for section, cls in typing.get_type_hints(ServeConfig).items()}
    config = ServeConfig(**sections)
    _check(config, given)
    if config.core.seed is None:
        config = dataclasses.replace(config, core=dataclasses.replace(config.core, seed=secrets.randbits(63)))
    return config


def is_loopback(host: str) -> bool:
    """Whether binding to `host` reaches this machine only; a name other than localhost counts as reachable."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def host_and_port(address: str) -> tuple[str, int]:
    """`HOST:PORT` taken apart; raises `ConfigError`."""
    host, colon, port = address.removeprefix("tcp://").rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{address!r} is not HOST:PORT, such as 127.0.0.1:5600")
    return host, int(port)


def memory_shares(text: str) -> dict[str, float]:
    """`prefill=0.4,decode=0.5` as a mapping; raises `ConfigError`."""
    wrong = ConfigError(
        f"--gpu-memory-share is {text!r}; it must look like prefill=0.4,decode=0.5 and sum to at most 1"
    )
    try:
        shares = {key.strip(): float(value) for key, value in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise wrong from None
    if set(shares) != set(ROLES) or not all(0 < share <= 1 for share in shares.values()) or sum(shares.values()) > 1:
        raise wrong
    return shares


def device_list(text: str) -> tuple[str, ...]:
    """`cpu:0,cpu:1` as names; raises `ConfigError`."""
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        kind, colon, number = name.partition(":")
        if kind not in ("cpu", "cuda") or not colon or not number.isdecimal():
            raise ConfigError(f"{name!r} is not a device; devices are cpu:0, cpu:1, ... and cuda:0, cuda:1, ...")
    return names


def read_api_keys(path: str) -> tuple[str, ...]:
    """The keys of an --api-key-file, one a line; raises `ConfigError` when there is none."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path}: {getattr(error, 'strerror', None) or error}") from None
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise ConfigError(f"--api-key-file {path} holds no key; write one key a line into it")
    return keys


def _check(config: ServeConfig, given: Mapping[str, Any]) -> None:
    """Everything that one flag alone cannot get wrong."""
    _check_network(config)
    engine, timeouts = config.engine, config.timeouts
    if config.is_colocated and given.get("disaggregate") == "always":
        raise ConfigError("--prefill 0 contradicts --disaggregate always; drop one of them, or give --prefill 1")
    if engine.kv_blocks is not None and engine.kv_memory_gb is not None:
        raise ConfigError("--kv-blocks and --kv-memory-gb both size the pool; give one of them")
    if engine.block_size is not None and engine.block_size & (engine.block_size - 1):
        raise ConfigError(f"--block-size is {engine.block_size}; it must be a power of two, such as 16 or 64")
    if not engine.landing_share > 0:
        raise ConfigError(f"--landing-share is {engine.landing_share:g}; it must be above 0 and at most 1")
    if engine.chunk_tokens > engine.max_batched_tokens:
        raise ConfigError(
            f"--chunk-tokens {engine.chunk_tokens} is more than --max-batched-tokens {engine.max_batched_tokens}; "
            "a chunk must fit into one step"
        )
    if timeouts.hang_timeout_s < timeouts.heartbeat_timeout_s:
        raise ConfigError(
            f"--hang-timeout {timeouts.hang_timeout_s:g} is below --heartbeat-timeout "
            f"{timeouts.heartbeat_timeout_s:g}; a worker is suspect before it is killed"
        )
    memory_shares(config.pools.gpu_memory_share)
    if config.pools.devices is not None:
        device_list(config.pools.devices)


def _check_network(config: ServeConfig) -> None:
    http = config.http
    if http.api_key_file is not None:
        read_api_keys(http.api_key_file)
    if not is_loopback(http.host) and http.api_key_file is None and not http.insecure:
        raise ConfigError(
            f"--host {http.host} can be reached from outside; give --api-key-file FILE, or say --insecure"
        )
    host, _ = host_and_port(config.core.control)
    if not is_loopback(host):
        raise ConfigError(f"--control {config.core.control} is not loopback; workers carry no keys yet, use 127.0.0.1")


def to_plain(config: Any) -> dict[str, Any]:
    """A config as JSON types only."""
    return dataclasses.asdict(config)


def from_plain(cls: type[T], plain: Mapping[str, Any]) -> T:
    """The inverse of `to_plain`, also after a trip through JSON; raises `ConfigError` for unknown or missing keys."""
    hints = typing.get_type_hints(cls)
    unknown, missing = sorted(set(plain) - set(hints)), sorted(set(hints) - set(plain))
    if unknown or missing:
        raise ConfigError(f"{cls.__name__}: unknown keys {unknown}, missing keys {missing}")
    return cls(**{name: _from_plain_value(hints[name], plain[name]) for name in hints})


def _from_plain_value(hint: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_plain(hint, value)
    if typing.get_origin(hint) is tuple and isinstance(value, list | tuple):
        return tuple(value)
    return value
