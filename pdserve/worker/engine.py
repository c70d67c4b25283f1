"""What a worker computes with, for as long as its process lives: model, kernels, KV pool and the links that export it.

Owns their construction, what is missing being found before what is slow is done. Invariant: everything
here survives a change of epoch; what must not is in the life of a node.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import pd_kernels
from kv_transfer.pool import Pool
from pd_kernels.protocols import KernelSet
from pdserve.config import WorkerConfig, cache_folder
from pdserve.errors import ConfigError
from pdserve.layout import KVLayout
from pdserve.machine import available_memory_bytes, pool_blocks
from pdserve.model import weights
from pdserve.model.decoder import Decoder
from pdserve.model.runner import Runner, Work
from pdserve.model.sampling import SampleRow
from pdserve.model.spec import ModelSpec, read_spec
from pdserve.model.store import resolve
from pdserve.request import Sampling

WARM_UP_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    spec: ModelSpec
    layout: KVLayout
    kernels: KernelSet
    pool: Pool
    runner: Runner
    weight_bytes: int
    max_model_len: int
    prefill_tokens_per_s: float  # measured at start


def build(config: WorkerConfig) -> Engine:
    """Raises `ConfigError` or `ModelError`. Pins the process to its cores first."""
    _pin(config)
    options = config.engine
    if config.device.startswith("cuda"):
        raise ConfigError("KV pools on GPUs cannot be exported yet; use --devices cpu:0,cpu:1")
    directory = (
        Path(config.model_dir) if config.model_dir else resolve(options.model, cache_dir=cache_folder() / "models")
    )
    spec = read_spec(directory)
    layout = spec.kv_layout(dtype=options.dtype, block_size=options.block_size_on(config.device))
    num_blocks = config.kv_blocks or pool_blocks(options, layout, available_memory_bytes(), 1)
    kernels = pd_kernels.select("cpu", options.dtype, spec.head_dim, options.kernels)
    loaded = weights.load(directory, spec, device="cpu", dtype=options.dtype, kernels=kernels)
    pool = Pool(num_blocks=num_blocks, block_bytes=layout.block_bytes, epoch="")
    kv = torch.from_numpy(pool.buffer).view(getattr(torch, options.dtype)).view(layout.shape(num_blocks))
    runner = Runner(Decoder(spec, loaded, kernels), kv)
    return Engine(
        spec=spec,
        layout=layout,
        kernels=kernels,
        pool=pool,
        runner=runner,
        weight_bytes=loaded.weight_bytes,
        max_model_len=min(options.max_model_len or spec.max_positions, (num_blocks - 1) * layout.block_size),
        prefill_tokens_per_s=_warm_up(runner, layout, num_blocks),
    )


def _pin(config: WorkerConfig) -> None:
    if config.cores:
        os.sched_setaffinity(0, config.cores)
    torch.set_num_threads(max(1, len(config.cores) or len(os.sched_getaffinity(0))))
    torch.set_num_interop_threads(1)


def _warm_up(runner: Runner, layout: KVLayout, num_blocks: int) -> float:
    """Run a prompt twice on blocks nobody has yet, then one decode step; tokens per second of the second time."""
    num_tokens = min(WARM_UP_TOKENS, (num_blocks - 2) * layout.block_size)
    table = range(1, num_blocks)[: layout.blocks_for(num_tokens + 1)]
    draw = SampleRow(
        sampling=Sampling(max_tokens=1, temperature=0.0), seed=0, prompt=(), output=(), position=num_tokens
    )
    prompt = Work(tokens=[0] * num_tokens, start=0, block_table=table, sample=(draw,))
    started_s = 0.0
    for _ in range(2):
        started_s = time.monotonic()
        runner.step([prompt])
    rate = num_tokens / (time.monotonic() - started_s)
    runner.step([Work(tokens=[0], start=num_tokens, block_table=table, sample=(draw,))])
    return rate
