"""What a worker computes with, for as long as its process lives: model, kernels, KV pool and the links that export it.

Owns their construction, what is missing being found before what is slow is done. Invariant: everything
here survives a change of epoch; what must not is in the life of a node.
"""

from __future__ import annotations

import os
import sys
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
from pdserve.model.graphs import CudaCapture, DecodeGraphs, buckets
from pdserve.model.runner import Runner, Work
from pdserve.model.sampling import SampleRow
from pdserve.model.spec import ModelSpec, read_spec
from pdserve.model.store import resolve
from pdserve.request import Sampling
from pdserve.terminal import Progress
from pdserve.worker.device_memory import DeviceMemory

WARM_UP_TOKENS = 128
GPU_RESERVE_BYTES = 10**9  # for activations and workspaces


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
    is_gpu = config.device.startswith("cuda")
    device = config.device if is_gpu else "cpu"
    if is_gpu:
        torch.cuda.set_device(torch.device(device))  # kernels and recordings go where the current device is
    is_int8 = config.role == "decode" and options.decode_weights == "int8"
    if is_gpu and is_int8:
        raise ConfigError("--decode-weights int8 is for decode workers on CPU; drop it, or --devices cuda:N")
    directory = (
        Path(config.model_dir) if config.model_dir else resolve(options.model, cache_dir=cache_folder() / "models")
    )
    spec = read_spec(directory)
    layout = spec.kv_layout(
        dtype=options.dtype,
        block_size=options.block_size_on(config.device),
        weights="int8" if is_int8 else "full",
    )
    try:
        kernels = pd_kernels.select(device, options.dtype, spec.head_dim, options.kernels)
    except pd_kernels.KernelError as error:
        raise ConfigError(f"--kernels {options.kernels}: {error}") from None
    loaded = weights.load(directory, spec, device=device, dtype=options.dtype, kernels=kernels, int8=is_int8)
    available = _free_gpu_bytes(config, spec) if is_gpu else available_memory_bytes()
    num_blocks = config.kv_blocks or pool_blocks(options, layout, available, 1, share=1.0 if is_gpu else None)
    pool, kv = _pool(device, layout, num_blocks)
    max_model_len = min(options.max_model_len or spec.max_positions, (num_blocks - 1) * layout.block_size)
    runner = Runner(Decoder(spec, loaded, kernels), kv)
    if is_gpu and config.role == "decode" and not options.enforce_eager:
        runner.graphs = _graphs(runner, options.max_running, max_model_len)
    return Engine(
        spec=spec,
        layout=layout,
        kernels=kernels,
        pool=pool,
        runner=runner,
        weight_bytes=loaded.weight_bytes,
        max_model_len=max_model_len,
        prefill_tokens_per_s=_warm_up(runner, layout, num_blocks),
    )


def _pool(device: str, layout: KVLayout, num_blocks: int) -> tuple[Pool, torch.Tensor]:
    """The pool, and its blocks as the model sees them."""
    size, memory = num_blocks * layout.block_bytes, []

    def allocate(num_bytes: int) -> DeviceMemory:
        memory.append(DeviceMemory(num_bytes, device))
        return memory[0]

    pool = Pool(
        num_blocks=num_blocks,
        block_bytes=layout.block_bytes,
        epoch="",
        allocate=None if device == "cpu" else allocate,
    )
    data = memory[0].tensor[:size] if memory else torch.from_numpy(pool.buffer)
    return pool, data.view(getattr(torch, layout.dtype)).view(layout.shape(num_blocks))


def _free_gpu_bytes(config: WorkerConfig, spec: ModelSpec) -> int:
    """What the worker's share of the GPU leaves beside the weights that are loaded now and what steps will need."""
    device = torch.device(config.device)
    free, total = torch.cuda.mem_get_info(device)
    left = int(total * config.memory_share) - torch.cuda.memory_allocated(device)
    rows = sum(buckets(config.engine.max_running)) if config.role == "decode" else 0
    graphs = 2 * 4 * rows * spec.vocab_size  # the logits of every recorded step
    return max(0, min(free, left) - GPU_RESERVE_BYTES - graphs)


def _graphs(runner: Runner, max_running: int, max_context: int) -> DecodeGraphs:
    """Record decode steps, said on the terminal with what they cost."""
    kv = runner.kv
    before, started_s = torch.cuda.memory_reserved(kv.device), time.monotonic()
    with Progress() as say, torch.inference_mode():
        graphs = DecodeGraphs(
            runner.decoder,
            kv,
            max_batch=max_running,
            max_context=max_context,
            capture=CudaCapture(kv.device),
            say=say,
        )
    cost = (torch.cuda.memory_reserved(kv.device) - before) / 1e6
    print(f"decode graphs: {time.monotonic() - started_s:.1f} s, {cost:.0f} MB", file=sys.stderr, flush=True)
    return graphs


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
