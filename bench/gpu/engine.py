"""Speed of the engine's own steps, sampling and all, on random Llamas of 1B and 8B, with recorded decoding and without.

Owns what is timed and the targets; `models` owns the weights. Invariant: a step is what a worker runs, from lists of
work to drawn tokens, waited for.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import pd_kernels
from bench.gpu.environment import ceilings
from bench.gpu.models import (
    DRY_SHAPES,
    SHAPES,
    Shape,
    decode_bytes,
    prefill_flops,
    random_weights,
    runner_of,
    spec_of,
)
from bench.gpu.section import Setting, Sink
from bench.gpu.timing import wall_s
from bench.report import Check, at_most
from pdserve.model.graphs import Capture, CudaCapture, DecodeGraphs, Replay
from pdserve.model.runner import Runner, Work
from pdserve.model.sampling import Sampled, SampleRow
from pdserve.model.spec import ModelSpec
from pdserve.request import Sampling

TARGETS = {1: 1.25, 64: 1.5}  # times what reading weights and KV takes, by batch size, with graphs
NEAR_TIE = 0.1  # nats; bfloat16 rounds otherwise where contexts are divided otherwise
GREEDY = Sampling(max_tokens=1, temperature=0.0)
WITH_TOP = Sampling(max_tokens=1, temperature=0.0, num_logprobs=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    prefill: tuple[tuple[int, int], ...]  # tokens, tokens per step
    batches: tuple[int, ...]
    context: int
    longest: int  # context that graphs are recorded for
    block_size: int
    repeats: int
    num_new: int  # tokens compared with and without graphs


FULL = Sizes(
    prefill=((512, 512), (8192, 8192), (8192, 2048)),
    batches=(1, 64),
    context=1024,
    longest=2048,
    block_size=64,
    repeats=20,
    num_new=24,
)
DRY = Sizes(prefill=((20, 8),), batches=(1, 2), context=20, longest=40, block_size=16, repeats=1, num_new=2)


def run(setting: Setting, sink: Sink) -> None:
    best = ceilings(setting)
    shapes = DRY_SHAPES if setting.is_dry else SHAPES
    for name, shape in shapes.items():
        sink.attempt(f"engine {name}", setting, partial(_measure, setting, sink, name, shape, best))
        if not setting.is_dry:
            gc.collect()
            torch.cuda.empty_cache()


def _measure(setting: Setting, sink: Sink, name: str, shape: Shape, best: dict[str, float]) -> None:
    _Model(setting, sink, name, shape, best).run()


class _Model:
    def __init__(self, setting: Setting, sink: Sink, name: str, shape: Shape, best: dict[str, float]) -> None:
        self._setting, self._sink, self._name, self._best = setting, sink, name, best
        self._sizes = DRY if setting.is_dry else FULL
        dtype = "float32" if setting.is_dry else "bfloat16"
        self._item_bytes = 4 if setting.is_dry else 2
        self._spec: ModelSpec = spec_of(name, shape)
        self._kernels = pd_kernels.select(setting.device, dtype, shape.head_dim, "triton")
        device = torch.device(setting.device)
        weights = random_weights(self._spec, self._kernels, device, getattr(torch, dtype), setting.seed)
        sizes = self._sizes
        self._blocks_each = -(-max(sizes.longest, max(n for n, _ in sizes.prefill)) // sizes.block_size)
        per_sequence = -(-sizes.longest // sizes.block_size)
        num_blocks = 1 + max(max(sizes.batches) * per_sequence, self._blocks_each)
        self._runner: Runner = runner_of(self._spec, weights, self._kernels, num_blocks, sizes.block_size)
        sink.row("weights", weights.weight_bytes, "bytes", model=name, kernels=self._kernels.why)

    def run(self) -> None:
        for num_tokens, chunk in self._sizes.prefill:
            self._try(f"prefill {num_tokens} by {chunk}", partial(self._prefill, num_tokens, chunk))
        for batch in self._sizes.batches:
            self._try(f"decode {batch}", partial(self._decode, batch, is_recorded=False))
        self._try("graphs", self._record)
        if self._runner.graphs is None:
            return
        for batch in self._sizes.batches:
            self._try(f"decode {batch}, graphs", partial(self._decode, batch, is_recorded=True))
            self._try(f"tokens of {batch}", partial(self._compare, batch))

    def _try(self, what: str, work: Callable[[], None]) -> None:
        self._sink.attempt(f"engine {self._name} {what}", self._setting, work)

    def _prefill(self, num_tokens: int, chunk: int) -> None:
        tokens, blocks = self._text(0, num_tokens), range(1, 1 + self._blocks_each)

        def work() -> None:
            for start in range(0, num_tokens, chunk):
                part = tokens[start : start + chunk]
                is_last = start + chunk >= num_tokens
                sample = (_row(GREEDY, num_tokens),) if is_last else ()
                self._runner.step([Work(tokens=part, start=start, block_table=blocks, sample=sample)])

        taken_s = wall_s(work, self._setting.device, max(self._sizes.repeats // 4, 1))
        best_s = prefill_flops(self._spec, num_tokens) / self._best["gemm"]
        about: dict[str, Any] = {
            "model": self._name,
            "tokens": num_tokens,
            "chunk": chunk,
            "ms": round(1e3 * taken_s, 3),
        }
        self._sink.row("prefill", num_tokens / taken_s, "tokens/s", ceiling=num_tokens / best_s, **about)

    def _decode(self, batch: int, *, is_recorded: bool) -> None:
        """Steps at one context, graphs or not, and what the same step takes beside its reads alone."""
        context = self._sizes.context
        works = [self._step(index, self._text(index, 1)[0], context - 1, GREEDY) for index in range(batch)]
        taken_s = wall_s(lambda: self._runner.step(works), self._setting.device, self._sizes.repeats)
        least_s = decode_bytes(self._spec, batch, context, self._item_bytes) / self._best["read"]
        self._sink.row(
            "decode",
            1 / taken_s,
            "steps/s",
            ceiling=1 / least_s,
            model=self._name,
            batch=batch,
            context=context,
            graphs=is_recorded,
            step_ms=round(1e3 * taken_s, 3),
            least_ms=round(1e3 * least_s, 3),
        )
        if is_recorded and batch in TARGETS and not self._setting.is_dry:
            name = f"decode step of {self._name}, batch {batch}, graphs"
            self._sink.check(at_most(name, taken_s / least_s, TARGETS[batch], "times reading weights and KV"))

    def _record(self) -> None:
        runner, sizes = self._runner, self._sizes
        capture: Capture = _rerun if self._setting.is_dry else CudaCapture(runner.kv.device)

        began_s = time.perf_counter()
        with torch.inference_mode():
            runner.graphs = DecodeGraphs(
                runner.decoder, runner.kv, max_batch=max(sizes.batches), max_context=sizes.longest, capture=capture
            )
        self._sink.row("recording", time.perf_counter() - began_s, "s", model=self._name, most=max(sizes.batches))

    def _generate(self, batch: int, forced: Sequence[Sequence[int]] = ()) -> list[list[Sampled]]:
        """Per step what each sequence drew, with its two likeliest; `forced` tokens are fed instead of those drawn."""
        start = self._sizes.context // 2
        fed = [self._text(index, 1)[0] for index in range(batch)]
        steps: list[list[Sampled]] = []
        for number in range(self._sizes.num_new):
            works = [self._step(index, token, start + number, WITH_TOP) for index, token in enumerate(fed)]
            drawn = [each for (each,) in self._runner.step(works)]
            steps.append(drawn)
            fed = list(forced[number]) if forced else [each.token for each in drawn]
        return steps

    def _compare(self, batch: int) -> None:
        """The same tokens fed, the same ones drawn; a graph divides contexts otherwise, so a near tie may turn."""
        graphs, self._runner.graphs = self._runner.graphs, None
        try:
            plain = self._generate(batch)
        finally:
            self._runner.graphs = graphs
        recorded = self._generate(batch, [[each.token for each in step] for step in plain])
        num_ties, wrong, farthest = 0, [], 0.0
        for number, (ours, theirs) in enumerate(zip(recorded, plain, strict=True)):
            for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                farthest = max(farthest, abs(dict(a.top).get(b.token, a.top[0][1]) - b.top[0][1]))
                if a.token != b.token:
                    is_tie = b.top[0][1] - b.top[1][1] < NEAR_TIE and a.token == b.top[1][0]
                    num_ties += is_tie
                    wrong += [] if is_tie else [f"step {number}, sequence {index}: {a}, not {b}"]
        about: dict[str, Any] = {"model": self._name, "batch": batch, "near_ties": num_ties}
        self._sink.row("graphs_logprob_difference", farthest, "nats", **about)
        name = f"logprobs of {self._name} x {batch}, graphs on and off"
        self._sink.check(at_most(name, farthest, 2 * NEAR_TIE, "nats apart"))
        name = f"tokens of {self._name} x {batch}, graphs on and off"
        self._sink.check(
            Check(name=name, value=len(wrong), bound="<= 0 differ", is_ok=not wrong, reason="; ".join(wrong[:2]))
        )

    def _step(self, index: int, token: int, position: int, sampling: Sampling) -> Work:
        count = -(-self._sizes.longest // self._sizes.block_size)
        table = range(1 + index * count, 1 + (index + 1) * count)
        return Work(tokens=[token], start=position, block_table=table, sample=(_row(sampling, position + 1),))

    def _text(self, index: int, num_tokens: int) -> list[int]:
        return [(7919 * n + 104_729 * index + 11) % self._spec.vocab_size for n in range(num_tokens)]


def _row(sampling: Sampling, position: int) -> SampleRow:
    return SampleRow(sampling=sampling, seed=0, prompt=(), output=(), position=position)


def _rerun(work: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
    """In place of a graph: the same function again, into the tensor of the first time."""
    out = work()

    def replay() -> None:
        out.copy_(work())

    return replay, out
