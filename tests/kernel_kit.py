"""Attention cases for every kernel set: pools poisoned with NaN, runs over them, and what they must equal."""

import os
from dataclasses import dataclass
from itertools import product

import torch

from pd_kernels.protocols import DecodeBatch, PrefillBatch

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass(kw_only=True)
class Case:
    contexts: list[int]
    queries: list[int]  # rows per request
    kv_heads: int = 2
    group: int = 3
    dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    seed: int = 0


def pool_of(case, device="cpu"):
    """A pool of three layers filled with NaN, the used rows of the middle one random; tables with poisoned tails."""
    generator = torch.Generator().manual_seed(case.seed)
    needed = [-(-c // case.block_size) for c in case.contexts]
    num_blocks = sum(needed) + 3
    pool = torch.full((num_blocks, 3, 2, case.kv_heads, case.block_size, case.dim), float("nan"), dtype=case.dtype)
    ids = torch.randperm(num_blocks, generator=generator, dtype=torch.int32)
    tables = torch.full((len(needed), max(needed) + 2), 2**31 - 1, dtype=torch.int32)
    kv, taken = pool[:, 1], 0
    for r, (count, context) in enumerate(zip(needed, case.contexts, strict=True)):
        tables[r, :count] = ids[taken : taken + count]
        taken += count
        for position in range(context):
            row = torch.randn(2, case.kv_heads, case.dim, generator=generator).to(case.dtype)
            kv[tables[r, position // case.block_size], :, :, position % case.block_size] = row
    q = torch.randn(sum(case.queries), case.kv_heads * case.group, case.dim, generator=generator).to(case.dtype)
    return q.to(device), pool.to(device)[:, 1], tables.to(device)


def prefill_batch(case, tables):
    starts = torch.tensor([0, *case.queries]).cumsum(0).to(tables)
    contexts = torch.tensor(case.contexts).to(tables)
    return PrefillBatch(
        query_start=starts,
        context_lens=contexts,
        block_tables=tables,
        max_query=max(case.queries),
        max_context=max(case.contexts),
    )


def run_prefill(kernel, case, q, kv, tables):
    out = torch.full_like(q, float("nan"))
    kernel(q, kv, prefill_batch(case, tables), case.dim**-0.5, out)
    return out


def run_decode(kernel, case, q, kv, tables):
    contexts = torch.tensor(case.contexts).to(tables)
    out = torch.full_like(q, float("nan"))
    batch = DecodeBatch(context_lens=contexts, block_tables=tables, max_context=max(case.contexts))
    kernel(q, kv, batch, case.dim**-0.5, out)
    return out


def naive(case, q, kv, tables):
    """Attention by its definition in float64, one query head at a time."""
    out, row = torch.empty(q.shape, dtype=torch.float64), 0
    for r, (context, queries) in enumerate(zip(case.contexts, case.queries, strict=True)):
        slots = [(tables[r, p // case.block_size], p % case.block_size) for p in range(context)]
        keys, values = (torch.stack([kv[b, i, :, o] for b, o in slots]).double() for i in (0, 1))
        for position in range(context - queries, context):
            for head in range(q.shape[1]):
                k, v = (x[: position + 1, head // case.group] for x in (keys, values))
                out[row, head] = torch.softmax(k @ q[row, head].double() * case.dim**-0.5, 0) @ v
            row += 1
    return out


def assert_close(actual, expected, dtype):
    torch.testing.assert_close(actual.double(), expected.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def with_dtype(case, dtype, **more):
    return Case(**{**vars(case), "dtype": dtype, **more})


DIMS, GROUPS = (64, 80, 96, 128, 256), (1, 3, 4, 7, 8)


def _cases(shapes, queries_of):
    """A pairwise subset, or the full grid where PDSERVE_FULL_GRID is set (`scripts/test-kernels`)."""
    if not os.environ.get("PDSERVE_FULL_GRID"):
        return _pairwise(shapes, queries_of)
    cases = []
    grid = product(DIMS, GROUPS, range(len(shapes)), (16, 64), (torch.float32, torch.float16))
    for dim, group, shape, block_size, dtype in grid:
        contexts = shapes[shape](block_size)
        queries = queries_of(shape, contexts, block_size)
        case = Case(contexts=contexts, queries=queries, kv_heads=2, group=group, dim=dim)
        cases.append(with_dtype(case, dtype, block_size=block_size, seed=len(cases)))
    return cases


def _pairwise(shapes, queries_of):
    """25 cases in which every pair of (head size, group, shape) values meets (an orthogonal array of strength 2)."""
    cases = []
    for i, dim in enumerate(DIMS):
        for j, group in enumerate(GROUPS):
            block_size = (16, 64)[(i + 2 * j) % 5 % 2]
            contexts = shapes[(i + j) % 5](block_size)
            queries = queries_of((i + j) % 5, contexts, block_size)
            dtype = (torch.float32, torch.float16)[(i + 3 * j) % 5 % 2]
            kv_heads = 1 + (group * dim <= 256)
            case = Case(contexts=contexts, queries=queries, kv_heads=kv_heads, group=group, dim=dim)
            cases.append(with_dtype(case, dtype, block_size=block_size, seed=len(cases)))
    return cases


def _edges(block_size):
    return [2 * block_size - 1, 2 * block_size, 2 * block_size + 1]


PREFILL_SHAPES = [
    lambda block_size: [1],
    _edges,  # no prefix
    _edges,  # all but a few tokens are prefix
    lambda block_size: [512],  # one request, a long prefix
    lambda block_size: [200, 1, 17, 64, 30, 5],  # ragged, one of them without queries
]
DECODE_SHAPES = [
    lambda block_size: [1],
    lambda block_size: [*_edges(block_size), block_size - 1, block_size, block_size + 1],
    lambda block_size: [512],
    lambda block_size: [1, 500, 33, 128],
    lambda block_size: [127, 128, 129, 257],
]


def _prefill_queries(shape, contexts, block_size):
    return {2: [1, 2, block_size], 3: [20], 4: [3, 1, 17, 31, 0, 5]}.get(shape, contexts)


PREFILL_CASES = _cases(PREFILL_SHAPES, _prefill_queries)
DECODE_CASES = _cases(DECODE_SHAPES, lambda shape, contexts, block_size: [1] * len(contexts))
