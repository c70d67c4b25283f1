"""Other attention kernels on the numbers that ours are timed on: torch's SDPA, FlexAttention and FlashInfer.

Owns their calls, as their documentation has them; a library that is not installed leaves a row that says so. Invariant:
each gets the layout it likes best, contiguous keys and values where it knows no blocks.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu import decode, prefill
from bench.gpu.cases import Case, build
from bench.gpu.section import Setting, Sink
from bench.gpu.timing import Work, device_s


def sdpa(setting: Setting, sink: Sink, chunk: Case, step: Case) -> None:
    """Contiguous keys and values [sequences, kv_heads, tokens, dim], with its own grouping of heads."""
    if len(chunk.contexts) == 1 and chunk.contexts == chunk.queries:
        q, keys, values = _contiguous(setting, chunk, chunk.queries[0])

        def causal() -> Tensor:
            return functional.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)

        _pair(setting, sink, "sdpa", "prefill", chunk, causal)
    if len(set(step.contexts)) == 1:
        q, keys, values = _contiguous(setting, step, 1)

        def plain() -> Tensor:
            return functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

        _pair(setting, sink, "sdpa", "decode", step, plain)


def flex(setting: Setting, sink: Sink, chunk: Case) -> None:
    """Compiled, with a causal block mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length = chunk.queries[0]
    q, keys, values = _contiguous(setting, chunk, length)
    mask = create_block_mask(_is_visible, None, None, length, length, device=setting.device)
    compiled: Any = torch.compile(flex_attention)

    def work() -> Any:
        return compiled(q, keys, values, block_mask=mask, enable_gqa=True)

    _pair(setting, sink, "flex", "prefill", chunk, work)


def _is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    del batch, head
    return query >= key


def flashinfer(setting: Setting, sink: Sink, chunk: Case, step: Case) -> None:
    """On our own blocks: its layout HND is [num_blocks, 2, kv_heads, block_size, dim]."""
    if importlib.util.find_spec("flashinfer") is None:
        sink.row("flashinfer", 0, "installed", why="not importable")
        return
    library: Any = importlib.import_module("flashinfer")
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=setting.device)
    for phase, case in (("prefill", chunk), ("decode", step)):
        built = build(case, setting.device, setting.seed)
        kv = built.kv.contiguous()
        counts = [-(-context // case.block_size) for context in case.contexts]
        starts = torch.tensor([0, *counts], dtype=torch.int32, device=setting.device).cumsum(0, dtype=torch.int32)
        ids = torch.cat([row[:count] for row, count in zip(built.tables, counts, strict=True)])
        last = torch.tensor([(n - 1) % case.block_size + 1 for n in case.contexts], device=setting.device).int()
        heads = (case.kv_heads * case.group, case.kv_heads, case.dim, case.block_size)
        if phase == "prefill":
            wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
            rows = torch.tensor([0, *case.rows], device=setting.device).cumsum(0).int()
            wrapper.plan(rows, starts, ids, last, *heads, causal=True, q_data_type=case.dtype)
        else:
            wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
            wrapper.plan(starts, ids, last, *heads, q_data_type=case.dtype, kv_data_type=case.dtype)
        _pair(setting, sink, "flashinfer", phase, case, lambda w=wrapper, q=built.q, kv=kv: w.run(q, kv))  # type: ignore[misc]


def _contiguous(setting: Setting, case: Case, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [sequences, q_heads, queries, dim], keys and values [sequences, kv_heads, context, dim]."""
    count, context = len(case.contexts), case.contexts[0]
    heads = (case.kv_heads * case.group, case.kv_heads, case.kv_heads)
    rows = (queries, context, context)
    q, keys, values = (
        torch.randn((count, h, n, case.dim), dtype=case.dtype, device=setting.device)
        for h, n in zip(heads, rows, strict=True)
    )
    return q, keys, values


def _pair(setting: Setting, sink: Sink, rival: str, phase: str, case: Case, theirs: Work) -> None:
    """A row: how many times as fast we are as they."""
    built = build(case, setting.device, setting.seed)
    work = prefill.work(case, built) if phase == "prefill" else decode.work(case, built)
    is_recorded = phase == "decode" and rival == "sdpa"
    ours_s = device_s(work, setting.device, recorded=is_recorded)
    theirs_s = device_s(theirs, setting.device, recorded=is_recorded)
    about: dict[str, Any] = {
        "case": case.name,
        "ours_us": round(ours_s * 1e6, 1),
        "theirs_us": round(theirs_s * 1e6, 1),
    }
    sink.row(f"vs_{rival}_{phase}", theirs_s / ours_s, "x", **about)
