"""Decode steps as recorded graphs: one launch for a whole forward pass, for batch sizes known beforehand.

Owns the buckets of batch sizes, the fixed buffers that graphs read, and padding; the decoder computes. A padding row is
token 0 at position 0 of block 0, the block no request ever has, so it can hurt nobody. Invariant: a step run from a
graph computes the same for its rows as the decoder would, and a step that fits no graph is not run from one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pd_kernels.protocols import DecodeBatch
from pdserve.model.decoder import Batch, Decoder

SHORT_CONTEXT = 2048  # tokens; up to here fewer splits of attention are launched
Replay = Callable[[], None]
Capture = Callable[[Callable[[], Tensor]], tuple[Replay, Tensor]]
"""Records a function that returns a tensor: what runs it again, and the tensor that each run fills."""


def buckets(most: int) -> list[int]:
    """Batch sizes to record: 1, 2, 4, then multiples of 8 to 64 and of 32 beyond; the last one is `most`."""
    sizes = {1, 2, 4, *range(8, min(most, 64) + 1, 8), *range(96, most + 1, 32)}
    return sorted({size for size in sizes if size < most} | {most})


class CudaCapture:
    """Records CUDA graphs that share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):  # compiles kernels and fills library workspaces outside the recording
            work()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=side):
            out = work()
        return graph.replay, out


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    replay: Replay
    logits: Tensor  # float32 [bucket, vocab]


class DecodeGraphs:
    def __init__(
        self,
        decoder: Decoder,
        kv: Tensor,
        *,
        max_batch: int,
        max_context: int,
        capture: Capture,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Record every bucket, the largest first so that smaller ones reuse its memory. `max_context` in tokens."""
        device, block_size = kv.device, kv.shape[4]
        self._sizes = buckets(max_batch)
        self._contexts = sorted({min(SHORT_CONTEXT, max_context), max_context})
        self._tokens = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._tokens)
        self._slots = torch.zeros_like(self._tokens)
        self._lens = torch.ones(max_batch, dtype=torch.int32, device=device)
        self._tables = torch.zeros((max_batch, -(-max_context // block_size)), dtype=torch.int32, device=device)
        decoder.grow_rope(max_context)
        self._graphs: dict[tuple[int, int], _Recorded] = {}
        for number, size in enumerate(reversed(self._sizes)):
            say(f"recording decode graphs: {number + 1} of {len(self._sizes)}")
            for context in self._contexts:
                batch = self._batch(size, context)
                replay, logits = capture(lambda batch=batch: decoder.forward(batch, kv))  # type: ignore[misc]
                self._graphs[size, context] = _Recorded(replay=replay, logits=logits)

    def run(self, batch: Batch) -> Tensor | None:
        """Float32 logits [rows, vocab], valid until the next run; None when the step is not one of plain decoding."""
        decode, rows = batch.decode, batch.num_decode
        if decode is None or batch.prefill is not None or batch.sampled is not None or rows > self._sizes[-1]:
            return None
        if decode.max_context > self._contexts[-1]:
            return None
        size = self._sizes[bisect_left(self._sizes, rows)]
        context = self._contexts[bisect_left(self._contexts, decode.max_context)]
        width = decode.block_tables.shape[1]
        inputs = (batch.tokens, batch.positions, batch.slots)
        for buffer, given in zip((self._tokens, self._positions, self._slots), inputs, strict=True):
            buffer[:rows].copy_(given)
            buffer[rows:size].zero_()
        self._lens[:rows].copy_(decode.context_lens)
        self._lens[rows:size].fill_(1)
        self._tables[:rows, :width].copy_(decode.block_tables)
        self._tables[rows:size, 0].zero_()
        recorded = self._graphs[size, context]
        recorded.replay()
        return recorded.logits[:rows]

    def _batch(self, size: int, context: int) -> Batch:
        decode = DecodeBatch(context_lens=self._lens[:size], block_tables=self._tables[:size], max_context=context)
        return Batch(
            tokens=self._tokens[:size],
            positions=self._positions[:size],
            slots=self._slots[:size],
            num_decode=size,
            decode=decode,
            prefill=None,
            sampled=None,
        )
