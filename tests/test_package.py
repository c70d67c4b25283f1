"""A built wheel holds all of the product and nothing else, and runs in an empty folder."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("pdserve", "kernels", "kv_transfer", "prefill_node", "decode_node", "coordinator", "bench")
SUFFIXES = (".py", ".cpp", ".h", ".html", ".typed")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that nothing is left in the tree."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*PACKAGES, "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", str(out)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


def test_every_source_file_is_in_the_wheel_and_no_test_is(wheel):
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {
        str(path.relative_to(ROOT / "kernels" if package == "kernels" else ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in SUFFIXES and "egg-info" not in str(path)
    }
    assert packed == expected


def test_the_licence_and_the_notices_are_in_the_wheel(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in ("LICENSE", "NOTICE"):
        assert any(name.endswith(f".dist-info/licenses/{wanted}") for name in names)


def test_the_wheel_runs_from_an_empty_folder(wheel, tmp_path):
    (tmp_path / "empty").mkdir()
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    for words in (["--version"], ["up", "--help"]):
        done = subprocess.run(
            [sys.executable, "-m", "pdserve", *words],
            cwd=tmp_path / "empty", env=environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "pdserve" in done.stdout
