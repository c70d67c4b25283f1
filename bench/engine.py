"""`pdserve bench engine`: speed of the engine alone on one core, beside its ceilings and beside `transformers`.

Owns what is timed and how; the engine is the one that serves, without processes around it. Invariant: both sides of a
ratio run on the same core in the same run, taking turns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.ceilings import Ceiling, ReadBandwidth, gemm, time_s
from bench.cores import on_cores
from bench.handoff import measure_handoff
from bench.inprocess import BLOCK_SIZE, Engine
from bench.overhead import null_set
from bench.quality import compare as compare_weights
from bench.report import BenchOptions, Check, Report, Row, at_least, at_most
from bench.rival import Rival
from bench.texts import cut, token_stream
from coordinator.frontend.tokenizer import load_tokenizer
from pd_kernels.cpu.build import Toolchain
from pd_kernels.cpu.library import load
from pdserve.layout import DTYPE_BYTES
from pdserve.model.runner import Work
from pdserve.model.sampling import SampleRow
from pdserve.model.spec import ModelSpec
from pdserve.model.store import resolve
from pdserve.request import Sampling
from pdserve.terminal import Progress

PREFILL_TOKENS = (128, 512, 2048)
BATCHES, CONTEXTS = (1, 8, 32), (128, 1024)
CHUNK = 512  # tokens, as served by default
FLOOR = 1.5  # times transformers
PREFILL_TARGETS, PREFILL_SHARE = (512, 2048), 0.6
DECODE_TARGETS = {(1, 128): 1.25, (32, 1024): 1.6}  # (batch, context): times the least time
OVERHEAD_MS = 1.5
NUM_TEXTS, NUM_TEXT_TOKENS = 20, 256  # of the int8 quality comparison
DTYPE = "bfloat16"
GREEDY = Sampling(max_tokens=1, temperature=0.0)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a piece of work cannot do without."""

    num_bytes: int
    flops: int

    def least_s(self, read: Ceiling | None, products: Ceiling) -> float:
        reading_s = self.num_bytes / read.per_s if read is not None else 0.0
        return max(reading_s, self.flops / products.per_s)


def prefill_cost(spec: ModelSpec, num_tokens: int) -> Cost:
    """Every weight but lm_head's for every token, causal attention, and one row of logits."""
    per_token = sum(n * k for n, k in linear_shapes(spec)) * spec.num_layers
    pairs = num_tokens * (num_tokens + 1) // 2
    attention = 4 * pairs * spec.num_heads * spec.head_dim * spec.num_layers
    head = 2 * spec.vocab_size * spec.hidden_size
    return Cost(num_bytes=0, flops=2 * num_tokens * per_token + attention + head)


def decode_cost(spec: ModelSpec, batch: int, context: int, weight_bytes: int = DTYPE_BYTES[DTYPE]) -> Cost:
    """All weights once, each sequence's keys and values once; `weight_bytes` of each weight."""
    weights = sum(n * k for n, k in linear_shapes(spec)) * spec.num_layers + spec.vocab_size * spec.hidden_size
    cache = batch * context * spec.kv_layout(dtype=DTYPE, block_size=BLOCK_SIZE).token_bytes
    attention = 4 * batch * context * spec.num_heads * spec.head_dim * spec.num_layers
    return Cost(num_bytes=weights * weight_bytes + cache, flops=2 * batch * weights + attention)


def linear_shapes(spec: ModelSpec) -> list[tuple[int, int]]:
    """(out, in) of one layer's products, fused as they are served."""
    heads, hidden, inner = spec.num_heads * spec.head_dim, spec.hidden_size, spec.intermediate_size
    return [(spec.qkv_size, hidden), (hidden, heads), (2 * inner, hidden), (hidden, inner)]


class Steps:
    """The engine's own steps on a pool full of ordinary numbers, sampling included."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._runner = engine.runner
        self._vocab = engine.spec.vocab_size
        for block in engine.runner.kv:
            block.normal_(std=0.5)

    def prefill(self, num_tokens: int) -> None:
        """One prompt in chunks, and its first token."""
        tokens = [(7 * index + 11) % self._vocab for index in range(num_tokens)]
        blocks = range(1, 2 + num_tokens // BLOCK_SIZE)
        for start in range(0, num_tokens, CHUNK):
            chunk = tokens[start : start + CHUNK]
            is_last = start + CHUNK >= num_tokens
            sample = (self._row(num_tokens),) if is_last else ()
            self._runner.step([Work(tokens=chunk, start=start, block_table=blocks, sample=sample)])

    def decode(self, batch: int, context: int) -> None:
        """One step of `batch` sequences whose new token is their `context`-th."""
        count = -(-context // BLOCK_SIZE)
        works = [
            Work(
                tokens=[(13 * index + 5) % self._vocab],
                start=context - 1,
                block_table=range(1 + index * count, 1 + (index + 1) * count),
                sample=(self._row(context),),
            )
            for index in range(batch)
        ]
        self._runner.step(works)

    def _row(self, position: int) -> SampleRow:
        return SampleRow(sampling=GREEDY, seed=0, prompt=(), output=(), position=position)


def speed_rows(steps: Steps, cores: int, repeats: int, say: Say) -> Iterator[Row]:
    """Ceilings first, then every prefill length and every decode shape with its share of them."""
    engine = steps.engine
    spec = engine.spec
    say("ceilings: products")
    products = gemm(linear_shapes(spec), engine.weights.dtype, engine.runner.decoder.kernels.layer)
    about: dict[str, Any] = {"cores": cores, "how": products.how}
    yield Row(name="ceiling_gemm", value=products.per_s / 1e9, unit="GFLOP/s", parameters=about)
    for num_tokens in PREFILL_TOKENS:
        say(f"prefill of {num_tokens} tokens")
        taken_s = time_s(lambda n=num_tokens: steps.prefill(n), repeats)  # type: ignore[misc]
        best_s = prefill_cost(spec, num_tokens).least_s(None, products)
        about = {"cores": cores, "tokens": num_tokens, "ms": round(1e3 * taken_s, 2)}
        yield Row(
            name="prefill",
            value=num_tokens / taken_s,
            unit="tokens/s",
            parameters=about,
            ceiling=num_tokens / best_s,
        )
    yield from decode_rows(steps, products, repeats, say, cores=cores)


def decode_rows(steps: Steps, products: Ceiling, repeats: int, say: Say, **about: Any) -> Iterator[Row]:
    """Every batch at every context beside reading as many bytes; `about` is said of each row."""
    spec, int8 = steps.engine.spec, about.get("weights") == "int8"
    shapes = [(batch, context) for batch in BATCHES for context in CONTEXTS]
    weight_bytes = 1 if int8 else DTYPE_BYTES[DTYPE]
    costs = {shape: decode_cost(spec, *shape, weight_bytes) for shape in shapes}
    reader = ReadBandwidth(max(cost.num_bytes for cost in costs.values()))
    for batch, context in shapes:
        say(f"decode of {batch} at context {context}")
        cost = costs[batch, context]
        read = reader.measure(cost.num_bytes)
        taken_s = time_s(lambda b=batch, c=context: steps.decode(b, c), repeats)  # type: ignore[misc]
        shape = {**about, "batch": batch, "context": context}
        read_about = {**shape, "bytes": cost.num_bytes, "how": read.how}
        yield Row(name="ceiling_read", value=read.per_s / 1e9, unit="GB/s", parameters=read_about)
        yield Row(
            name="decode",
            value=1 / taken_s,
            unit="steps/s",
            parameters={**shape, "step_ms": round(1e3 * taken_s, 3)},
            ceiling=1 / cost.least_s(read, products),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Times of ours and theirs, taken in turns."""

    name: str
    ours_s: list[float]
    theirs_s: list[float]

    @property
    def ratio(self) -> float:
        """How many times as fast we are: the median over the pairs."""
        return median(theirs / ours for ours, theirs in zip(self.ours_s, self.theirs_s, strict=True))

    def row(self) -> Row:
        ours, theirs = median(self.ours_s) * 1e3, median(self.theirs_s) * 1e3
        about = {"ours_ms": round(ours, 2), "theirs_ms": round(theirs, 2), "pairs": len(self.ours_s)}
        return Row(name=self.name, value=self.ratio, unit="x", parameters=about)


def compare(steps: Steps, directory: Path, repeats: int, say: Say) -> Iterator[Pairs]:
    """Prefill of 512 tokens and decode of every batch at 128 tokens, against `generate`."""
    rival = Rival(directory)

    def timed(work: Callable[[], None]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    say("prefill of 512 tokens, beside transformers")
    pairs = [(timed(lambda: steps.prefill(512)), rival.prefill_s(512)) for _ in range(repeats + 1)][1:]
    ours, theirs = map(list, zip(*pairs, strict=True))
    yield Pairs(name="vs_transformers_prefill_512", ours_s=ours, theirs_s=theirs)
    for batch in BATCHES:
        say(f"decode of {batch}, beside transformers")
        ours = []

        def our_turn(context: int, batch: int = batch, ours: list[float] = ours) -> None:
            ours.append(timed(lambda: steps.decode(batch, context)))

        theirs = rival.decode_s(batch, CONTEXTS[0], repeats + 1, our_turn)
        yield Pairs(name=f"vs_transformers_decode_{batch}", ours_s=ours[1 : repeats + 1], theirs_s=theirs[1:])


NUM_BLOCKS = max(BATCHES) * (max(CONTEXTS) // BLOCK_SIZE + 1) + 1


def overhead_row(engine: Engine, directory: Path, repeats: int) -> Row | None:
    """A step of 32 in which no kernel computes; None where the kernels are not the native ones."""
    kernels = engine.runner.decoder.kernels
    if kernels.name != "cpu":
        return None
    null = null_set(load(Toolchain()), kernels, engine.weights.dtype)
    empty = Steps(Engine(directory, dtype=DTYPE, num_blocks=NUM_BLOCKS, kernels=null))
    taken_ms = 1e3 * time_s(lambda: empty.decode(max(BATCHES), CONTEXTS[0]), repeats)
    return Row(name="step_overhead", value=taken_ms, unit="ms", parameters={"batch": max(BATCHES), "with": "sampling"})


def int8_rows(full: Engine, directory: Path, repeats: int, say: Say) -> Iterator[Row]:
    """Decode with int8 weights, and how far its logits are from the full ones on the same text."""
    rounded = Engine(directory, dtype=DTYPE, num_blocks=NUM_BLOCKS, int8=True)
    spec = full.spec
    products = gemm(linear_shapes(spec), full.weights.dtype, full.runner.decoder.kernels.layer)
    yield from decode_rows(Steps(rounded), products, repeats, say, cores=1, weights="int8")
    say("int8 quality")
    stream = token_stream(load_tokenizer(directory).encode, 0)
    yield from compare_weights(full, rounded, cut(stream, [NUM_TEXT_TOKENS] * NUM_TEXTS)).rows()


def target_checks(rows: Sequence[Row]) -> Iterator[Check]:
    """What one core has to reach, in shares of what it could at best."""
    for row in rows:
        about, share = row.parameters, row.value / row.ceiling if row.ceiling else 0.0
        if about.get("cores") != 1 or about.get("weights") == "int8":
            continue
        if row.name == "prefill" and about["tokens"] in PREFILL_TARGETS:
            yield at_least(f"prefill {about['tokens']} share", share, PREFILL_SHARE, "of the GEMM ceiling")
        shape = (about.get("batch"), about.get("context"))
        if row.name == "decode" and shape in DECODE_TARGETS:
            bound = DECODE_TARGETS[shape]
            yield at_most(f"decode {shape[0]} at {shape[1]}", 1 / share, bound, "times the least time")


def main(options: BenchOptions) -> int:
    """Runs it all; the exit status."""
    report = Report(options)
    repeats = 5 if options.is_quick else 15
    directory = resolve(options.model)
    with Progress() as say:
        with on_cores(1) as cores:
            engine = Engine(directory, dtype=DTYPE, num_blocks=NUM_BLOCKS)
            why = engine.runner.decoder.kernels.why
            memory = {"kernels": why, "core": cores[0], "dtype": DTYPE}
            report.rows.append(Row(name="weights", value=engine.weights.weight_bytes, unit="bytes", parameters=memory))
            steps = Steps(engine)
            report.rows.extend(speed_rows(steps, 1, repeats, say))
            report.checks.extend(target_checks(report.rows))
            if (overhead := overhead_row(engine, directory, repeats)) is not None:
                report.rows.append(overhead)
                report.checks.append(at_most("step overhead at batch 32", overhead.value, OVERHEAD_MS, "ms"))
            report.rows.extend(int8_rows(engine, directory, repeats, say))
            for pairs in compare(steps, directory, repeats, say):
                report.rows.append(pairs.row())
                report.checks.append(at_least(pairs.name, pairs.ratio, FLOOR, "times as fast"))
        if not options.is_quick and len(os.sched_getaffinity(0)) > 1:
            with on_cores(2):
                report.rows.extend(speed_rows(steps, 2, repeats, say))
        measure_handoff(report, directory, say)
    return report.finish()


if __name__ == "__main__":
    import argparse
    import sys

    parser = argparse.ArgumentParser(description="speed of the engine on one core")
    parser.add_argument("--json")
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    sys.exit(main(BenchOptions(json=asked.json, is_quick=asked.quick)))
