"""Cores of a measurement: everything inside runs on so many, with as many threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pdserve.errors import ConfigError


@contextmanager
def on_cores(count: int) -> Iterator[tuple[int, ...]]:
    """The last `count` of the allowed cores; what was before is restored. Raises `ConfigError` when there are fewer."""
    allowed, threads = os.sched_getaffinity(0), torch.get_num_threads()
    if not 1 <= count <= len(allowed):
        raise ConfigError(f"{count} cores are wanted, {len(allowed)} are allowed here")
    cores = tuple(sorted(allowed)[-count:])
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(count)
    try:
        yield cores
    finally:
        torch.set_num_threads(threads)
        os.sched_setaffinity(0, allowed)
