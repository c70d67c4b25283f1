"""The config dataclasses and the environment they read."""

import dataclasses
from pathlib import Path

import pytest

from pdserve.config import (
    EngineOptions,
    PoolOptions,
    ServeConfig,
    cache_folder,
    child_environment,
    pip_arguments,
    runtime_folder,
    visible_gpus,
)


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ServeConfig().pools.prefill = 2  # type: ignore[misc]


def test_blocks_are_16_tokens_on_cpu_and_64_on_a_gpu_unless_said():
    assert EngineOptions().block_size_on("cpu:0") == 16
    assert EngineOptions().block_size_on("cuda:1") == 64
    assert EngineOptions(block_size=32).block_size_on("cuda:1") == 32


def test_no_prefill_pool_means_colocated():
    assert ServeConfig(pools=PoolOptions(prefill=0)).is_colocated
    assert not ServeConfig().is_colocated


def test_the_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/x/cache")
    assert cache_folder() == Path("/x/cache/pdserve")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "pdserve"


def test_the_runtime_folder_is_the_sessions_or_one_of_this_user(monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert runtime_folder() == Path("/run/user/7/pdserve")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert runtime_folder().name.startswith("pdserve-")


def test_pip_arguments_are_split_at_spaces(monkeypatch):
    monkeypatch.setenv("PDSERVE_PIP_ARGS", "--quiet  --no-cache-dir")
    assert pip_arguments() == ("--quiet", "--no-cache-dir")


@pytest.mark.parametrize(("text", "count"), [("0,1", 2), ("", 0), ("-1", 0), ("2,-1,3", 1), ("GPU-aa", 1)])
def test_visible_gpus_are_counted_up_to_the_first_invalid_one(monkeypatch, text, count):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    assert visible_gpus() == count


def test_without_a_list_every_gpu_is_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() is None


def test_children_compute_with_as_many_threads_as_they_are_given():
    environment = child_environment(3)
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "3"
