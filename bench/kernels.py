"""`pdserve bench kernels`: every kernel over a grid of shapes, beside what the machine can do at best.

Owns the shapes and what each must read, write and multiply; the ceilings are measured in the same run, on the same
cores. Invariant: bytes counted are those that cannot be avoided, so a share is never flattered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.ceilings import Ceiling, ReadBandwidth, copy_bandwidth, gemm, time_s
from bench.cores import on_cores
from bench.report import BenchOptions, Report, Row, at_least
from pd_kernels import DecodeBatch, KernelSet, PrefillBatch, select
from pd_kernels.cpu.arena import Arena
from pdserve.terminal import Progress

BLOCK_SIZE = 16
DECODE_SHARE = 0.7  # of the read ceiling, at the longest context
SLICE = 3  # of the cache's layers is measured: strides as served


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Heads and widths of one model's layer."""

    name: str
    q_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int


SMOL = Shape(name="135M", q_heads=9, kv_heads=3, head_dim=64, hidden=576, inner=1536)
LARGE = Shape(name="1B", q_heads=32, kv_heads=8, head_dim=64, hidden=2048, inner=8192)


class Cache:
    """A pool in huge pages, full of ordinary numbers, its blocks handed out in a shuffled order."""

    def __init__(self, shape: Shape, num_tokens: int, dtype: torch.dtype) -> None:
        count = num_tokens // BLOCK_SIZE + 2
        size = (count, SLICE, 2, shape.kv_heads, BLOCK_SIZE, shape.head_dim)
        pool = Arena().empty(size, dtype)
        pool.copy_(torch.randn(size[1:]).to(dtype).expand(size))
        self.kv = pool[:, SLICE // 2]
        self._order = torch.randperm(count - 1, generator=torch.Generator().manual_seed(0)) + 1

    def tables(self, contexts: Sequence[int]) -> Tensor:
        counts = [-(-context // BLOCK_SIZE) for context in contexts]
        tables = torch.zeros((len(contexts), max(counts)), dtype=torch.int32)
        at = 0
        for row, count in enumerate(counts):
            tables[row, :count] = self._order[at : at + count]
            at += count
        return tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kernel at one shape: how to run it once, and what it cannot do without."""

    kernel: str
    parameters: Mapping[str, object]
    run: Callable[[], object]
    num_bytes: int = 0
    flops: int = 0


def attention_cases(kernels: KernelSet, shape: Shape, dtype: torch.dtype, *, is_quick: bool) -> Iterator[Case]:
    size = torch.finfo(dtype).bits // 8
    scale = shape.head_dim**-0.5
    longest = 4096
    for tokens, prefix in ((512, 0), (512, 1536), (2048, 0))[: 2 if is_quick else 3]:
        cache = Cache(shape, tokens + prefix, dtype)
        q = torch.randn(tokens, shape.q_heads, shape.head_dim).to(dtype)
        out = torch.empty_like(q)
        batch = PrefillBatch(
            query_start=torch.tensor([0, tokens], dtype=torch.int32),
            context_lens=torch.tensor([tokens + prefix], dtype=torch.int32),
            block_tables=cache.tables([tokens + prefix]),
            max_query=tokens,
            max_context=tokens + prefix,
        )
        pairs = tokens * prefix + tokens * (tokens + 1) // 2
        yield Case(
            kernel="prefill_attention",
            parameters={"model": shape.name, "tokens": tokens, "prefix": prefix},
            run=lambda q=q, kv=cache.kv, batch=batch, out=out: kernels.prefill(q, kv, batch, scale, out),  # type: ignore[misc]
            flops=4 * pairs * shape.q_heads * shape.head_dim,
        )
    for rows, context in ((1, 1024), (1, longest), (8, longest), (32, 1024)):
        cache = Cache(shape, rows * context, dtype)
        q = torch.randn(rows, shape.q_heads, shape.head_dim).to(dtype)
        out = torch.empty_like(q)
        lens = [context] * rows
        decode = DecodeBatch(
            context_lens=torch.tensor(lens, dtype=torch.int32), block_tables=cache.tables(lens), max_context=context
        )
        yield Case(
            kernel="decode_attention",
            parameters={"model": shape.name, "batch": rows, "context": context},
            run=lambda q=q, kv=cache.kv, batch=decode, out=out: kernels.decode(q, kv, batch, scale, out),  # type: ignore[misc]
            num_bytes=2 * rows * context * shape.kv_heads * shape.head_dim * size,
        )


def layer_cases(kernels: KernelSet, shape: Shape, dtype: torch.dtype) -> Iterator[Case]:
    layer, size = kernels.layer, torch.finfo(dtype).bits // 8
    qkv_size = (shape.q_heads + 2 * shape.kv_heads) * shape.head_dim
    weight = torch.ones(shape.hidden).to(dtype)
    for rows in (1, 32, 512):
        x, residual = (torch.randn(rows, shape.hidden).to(dtype) for _ in range(2))
        gate_up = torch.randn(rows, 2 * shape.inner).to(dtype)
        qkv, rope = torch.randn(rows, qkv_size).to(dtype), torch.randn(rows, 2, shape.head_dim // 2)
        cache, slots = Cache(shape, rows, dtype), torch.arange(rows) + BLOCK_SIZE
        about = {"model": shape.name, "rows": rows}
        yield Case(
            kernel="add_rms_norm",
            parameters=about,
            run=lambda x=x, r=residual: layer.add_rms_norm(x, r, weight, 1e-5),  # type: ignore[misc]
            num_bytes=4 * x.nbytes,
        )
        yield Case(
            kernel="silu_mul",
            parameters=about,
            run=lambda x=gate_up: layer.silu_mul(x),  # type: ignore[misc]
            num_bytes=gate_up.nbytes * 3 // 2,
        )
        yield Case(
            kernel="rope_write",
            parameters=about,
            run=lambda x=qkv, t=rope, s=slots, kv=cache.kv: layer.rope_write(x, t, s, kv, None),  # type: ignore[misc]
            num_bytes=2 * qkv.nbytes + rope.nbytes,
        )
    for n, k in ((qkv_size, shape.hidden), (2 * shape.inner, shape.hidden), (shape.hidden, shape.inner)):
        # enough copies that none is in a cache when its turn comes again
        copies = max(2, (256 << 20) // (n * k * size))
        for int8 in (False, True):
            packed = [layer.pack_linear(torch.randn(n, k).to(dtype), None, int8=int8) for _ in range(copies)]
            for rows in (1, 8, 32, 512):
                x = torch.randn(rows, k).to(dtype)

                def run(x: Tensor = x, packed: Sequence[Callable[[Tensor], Tensor]] = packed) -> None:
                    for linear in packed:
                        linear(x)

                yield Case(
                    kernel="linear_int8" if int8 else "linear",
                    parameters={"out": n, "in": k, "rows": rows, "weights": copies},
                    run=run,
                    num_bytes=copies * n * k * (1 if int8 else size),
                    flops=2 * copies * rows * n * k,
                )


def sampling_cases(kernels: KernelSet, vocab_size: int = 49152) -> Iterator[Case]:
    yield Case(
        kernel="gumbel",
        parameters={"vocab": vocab_size},
        run=lambda: kernels.sampling.gumbel(1, 2, None, vocab_size),
        num_bytes=4 * vocab_size,
    )


def rows_of(cases: Iterator[Case], reader: ReadBandwidth, products: Ceiling, repeats: int) -> Iterator[Row]:
    """A case is shown by what bounds it: bytes per second, or operations per second."""
    for case in cases:
        taken_s = time_s(case.run, repeats)
        reading_s = case.num_bytes / reader.measure(case.num_bytes).per_s if case.num_bytes else 0.0
        multiplying_s = case.flops / products.per_s
        about = {**case.parameters, "us": round(1e6 * taken_s, 1)}
        if multiplying_s > reading_s:
            done, unit = case.flops / 1e9, "GFLOP/s"
        else:
            done, unit = case.num_bytes / 1e9, "GB/s"
        least_s = max(multiplying_s, reading_s)
        yield Row(name=case.kernel, value=done / taken_s, unit=unit, parameters=about, ceiling=done / least_s)


def main(options: BenchOptions) -> int:
    """Runs it all on one core; the exit status."""
    report = Report(options)
    repeats = 5 if options.is_quick else 15
    torch.manual_seed(options.seed)
    with Progress() as say, on_cores(1) as cores:
        dtype = torch.bfloat16
        kernels = select("cpu", "bfloat16", SMOL.head_dim)
        shapes = [(2 * SMOL.inner, SMOL.hidden), (SMOL.hidden, SMOL.inner)]
        say("ceilings")
        products = gemm(shapes, dtype, kernels.layer)
        reader = ReadBandwidth(512 << 20)
        read, copy = reader.measure(512 << 20), copy_bandwidth(256 << 20)
        about = {"kernels": kernels.why, "cores": list(cores)}
        for name, ceiling, unit in (
            ("ceiling_gemm", products, "GFLOP/s"),
            ("ceiling_read", read, "GB/s"),
            ("ceiling_copy", copy, "GB/s"),
        ):
            parameters = {**about, "how": ceiling.how}
            report.rows.append(Row(name=name, value=ceiling.per_s / 1e9, unit=unit, parameters=parameters))
        for shape in (SMOL,) if options.is_quick else (SMOL, LARGE):
            for cases in (
                attention_cases(kernels, shape, dtype, is_quick=options.is_quick),
                layer_cases(kernels, shape, dtype),
            ):
                for row in rows_of(cases, reader, products, repeats):
                    say(f"{row.name} {row.parameters}")
                    report.rows.append(row)
        report.rows.extend(rows_of(sampling_cases(kernels), reader, products, repeats))
    for row in report.rows:
        if row.name == "decode_attention" and row.parameters["context"] == 4096 and row.ceiling:
            name = f"decode attention {row.parameters['model']} batch {row.parameters['batch']} context 4096"
            report.checks.append(at_least(name, row.value / row.ceiling, DECODE_SHARE, "of the read ceiling"))
    return report.finish()
