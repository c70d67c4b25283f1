"""What every attention launch needs: checked shapes, the device's size, and whether kernels are interpreted.

Owns no kernel. Invariant: a launch that passes `check` reads and writes only what the protocols name.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOG2_E = 1.4426950408889634
MOST_HEADS = 128  # query heads of one KV head: they share a tile
INTERPRETED_MULTIPROCESSORS = 8  # what the interpreter pretends to have, so that small tests are split too


class Heads(NamedTuple):
    """The sizes a kernel is compiled for."""

    kv_heads: int
    group: int  # query heads of one KV head
    head_dim: int
    padded_dim: int  # the next power of two, at least 16
    block_size: int


@triton.jit
def _probe() -> None:
    return


INTERPRETED = not isinstance(_probe, triton.JITFunction)


def check(q: Tensor, kv: Tensor, tables: Tensor, lengths: tuple[Tensor, ...], scale: float, out: Tensor) -> Heads:
    """The sizes of one launch. Raises ValueError naming the shape or tensor that the kernels cannot take."""
    if q.dim() != 3 or kv.dim() != 5 or kv.shape[1] != 2:
        raise ValueError(f"attention of q {tuple(q.shape)} over kv {tuple(kv.shape)}: not the shapes of the protocol")
    q_heads, head_dim = q.shape[1:]
    kv_heads, block_size = kv.shape[2:4]
    group = q_heads // max(kv_heads, 1)
    fits = kv.shape[4] == head_dim and group > 0 and q_heads == group * kv_heads and kv.stride(4) == 1
    if q.dtype not in DTYPES or kv.dtype != q.dtype or not fits or q.stride(2) != 1 or not 1 <= head_dim <= 256:
        raise ValueError(
            f"attention of q {tuple(q.shape)} {q.dtype} over kv {tuple(kv.shape)} {kv.dtype} {kv.stride()}"
        )
    if group > MOST_HEADS:
        raise ValueError(
            f"attention of q {tuple(q.shape)} over {kv_heads} KV heads: more than {MOST_HEADS} heads to one"
        )
    if INTERPRETED and q.dtype is torch.bfloat16:
        raise ValueError("Triton's interpreter multiplies bfloat16 wrongly: use float32 or float16 there")
    if not out.is_contiguous() or out.shape != q.shape or out.dtype != q.dtype:
        raise ValueError(f"out must be contiguous {tuple(q.shape)} {q.dtype}, not {tuple(out.shape)} {out.dtype}")
    if tables.dtype != torch.int32 or (tables.shape[1] > 1 and tables.stride(1) != 1):
        raise ValueError("block_tables must be int32 with contiguous rows")
    if any(x.dtype != torch.int32 or not x.is_contiguous() for x in lengths):
        raise ValueError("context_lens and query_start must be contiguous int32")
    if any(x.device != q.device for x in (kv, out, tables, *lengths)):
        raise ValueError(f"attention of q on {q.device}: kv, out and the batch must be there too")
    if not scale > 0:
        raise ValueError(f"the scale of attention must be positive, not {scale}")
    return Heads(kv_heads, group, head_dim, max(16, triton.next_power_of_2(head_dim)), block_size)


def precision(dtype: torch.dtype) -> str:
    """Of products: float32 is never shortened to TF32; 16-bit products are exact anyway."""
    return "ieee" if dtype is torch.float32 else "tf32"


@lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Launch there: Triton uses the current device, whatever its arguments are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
