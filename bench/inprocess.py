"""The engine without a server: the same model and kernels, one process, the simplest of schedulers.

Owns loading and a pool in which every request has blocks of its own; no prefix cache, no hand-off. Invariant: what it
computes for a request depends on batch mates only as far as the kernels themselves do.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.arms import Answer, Ask
from pd_kernels import select
from pd_kernels.cpu.arena import Arena
from pd_kernels.protocols import KernelSet
from pdserve.model.decoder import Decoder
from pdserve.model.runner import Runner, Work
from pdserve.model.sampling import SampleRow
from pdserve.model.spec import ModelSpec, read_spec
from pdserve.model.weights import DTYPES, Weights, load
from pdserve.request import Sampling

BLOCK_SIZE = 16


class Engine:
    """A loaded model and a pool of `num_blocks` blocks, of which block 0 stays unused."""

    def __init__(
        self,
        directory: Path,
        *,
        dtype: str,
        num_blocks: int,
        kernels: str | KernelSet = "auto",
        int8: bool = False,
    ) -> None:
        """`kernels` is a set, or the name of one to choose."""
        self.spec: ModelSpec = read_spec(directory)
        self.dtype = dtype
        self.layout = self.spec.kv_layout(dtype=dtype, block_size=BLOCK_SIZE)
        chosen = select("cpu", dtype, self.spec.head_dim, kernels) if isinstance(kernels, str) else kernels
        self.weights: Weights = load(directory, self.spec, device="cpu", dtype=dtype, kernels=chosen, int8=int8)
        kv = Arena().empty(self.layout.shape(num_blocks), DTYPES[dtype])
        self.runner = Runner(Decoder(self.spec, self.weights, chosen), kv)
        self.num_blocks = num_blocks


class InProcessArm:
    """Prompts are run in chunks of `chunk` tokens and decode together, all in the same steps."""

    def __init__(self, engine: Engine, *, chunk: int = 512) -> None:
        self._engine = engine
        self._chunk = chunk

    def complete(self, asks: Sequence[Ask]) -> list[Answer]:
        runs = self._place(asks)
        while running := [run for run in runs if not run.is_done]:
            drawn = self._engine.runner.step([run.work(self._chunk) for run in running])
            for run, sampled in zip(running, drawn, strict=True):
                run.output.extend(each.token for each in sampled)
        return [Answer(tokens=tuple(run.output), mode="in process") for run in runs]

    def _place(self, asks: Sequence[Ask]) -> list[_Run]:
        runs, first = [], 1
        for ask in asks:
            count = self._engine.layout.blocks_for(len(ask.prompt) + ask.num_new)
            runs.append(_Run(ask, range(first, first + count)))
            first += count
        if first > self._engine.num_blocks:
            raise ValueError(f"{first} blocks needed, {self._engine.num_blocks} there")
        return runs


class _Run:
    def __init__(self, ask: Ask, blocks: Sequence[int]) -> None:
        self.output: list[int] = []
        self._ask = ask
        self._blocks = blocks
        self._num_cached = 0
        bias = () if ask.forced is None else ((ask.forced, 100.0),)
        self._sampling = Sampling(
            max_tokens=ask.num_new,
            temperature=ask.temperature,
            top_p=ask.top_p,
            seed=ask.seed,
            logit_bias=bias,
            ignore_eos=True,
        )

    @property
    def is_done(self) -> bool:
        return len(self.output) >= self._ask.num_new

    def work(self, chunk: int) -> Work:
        known = [*self._ask.prompt, *self.output]
        start = self._num_cached
        tokens = known[start : start + chunk]
        self._num_cached += len(tokens)
        row = SampleRow(
            sampling=self._sampling,
            seed=self._ask.seed,
            prompt=self._ask.prompt,
            output=tuple(self.output),
            position=len(known),
        )
        is_last = self._num_cached == len(known)
        return Work(tokens=tokens, start=start, block_table=self._blocks, sample=(row,) if is_last else ())
