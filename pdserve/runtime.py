"""How commands find a running server: one small file per live server in a folder only its user may enter.

Owns the files' names, modes and liveness; talks to nobody. Invariant: a record that is returned belongs to a process
that lives now; a dead server's file is never followed.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

from pdserve.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeRecord:
    base_url: str
    admin_url: str
    admin_key: str
    pid: int
    started_ticks: int  # of `pid`, since boot: tells a reused pid apart


def started_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when there is none, or only its zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def private_folder(folder: Path) -> Path:
    """`folder`, made if need be and entered by its owner only; raises `ConfigError` when somebody else has it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigError(f"{folder} is not a folder of this user; remove it, or set XDG_RUNTIME_DIR to one")
    if stat.S_IMODE(status.st_mode) & 0o077:
        folder.chmod(0o700)
    return folder


def write_record(folder: Path, port: int, record: RuntimeRecord) -> Path:
    """Leave a record for commands on this machine; the file is complete and private from its first moment."""
    path = private_folder(folder) / f"{port}.json"
    draft = path.with_name(f".{port}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(asdict(record), file)
    draft.replace(path)
    return path


def remove_record(folder: Path, port: int, pid: int) -> None:
    """Remove the record of `pid` at exit; one that another server has written meanwhile stays."""
    path = folder / f"{port}.json"
    record = _read(path)
    if record is not None and record.pid == pid:
        path.unlink(missing_ok=True)


def _read(path: Path) -> RuntimeRecord | None:
    try:
        return RuntimeRecord(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def live_records(folder: Path) -> list[RuntimeRecord]:
    """The records of servers that live, by port file name."""
    records = [_read(path) for path in sorted(folder.glob("*.json"))]
    return [record for record in records if record is not None and started_ticks(record.pid) == record.started_ticks]


def the_only_record(folder: Path, port: int | None = None) -> RuntimeRecord:
    """The record of the only live server, or of the one on `port`; raises `ConfigError` when that is not one."""
    records = [record for record in live_records(folder) if port is None or record.base_url.endswith(f":{port}")]
    if len(records) == 1:
        return records[0]
    if not records:
        where = "" if port is None else f" on port {port}"
        raise ConfigError(f"no server of this user is running here{where}; start one with `pdserve up`")
    urls = ", ".join(record.base_url for record in records)
    raise ConfigError(f"{len(records)} servers are running ({urls}); say which one with --port")
