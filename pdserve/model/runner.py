"""One step of one worker: lists of work in, drawn tokens out.

Owns the batch's tensors and their order (decode rows first); schedulers decide what is in a step, the pool who holds
which block. Invariant: when `step` returns, everything it wrote to the cache is complete on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pd_kernels.protocols import DecodeBatch, PrefillBatch
from pdserve.model.decoder import Batch, Decoder
from pdserve.model.graphs import DecodeGraphs
from pdserve.model.sampling import Sampled, SampleRow, sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Tokens of one request to run at positions [start, start + len(tokens)).

    Positions before `start` are in the cache already. `block_table` covers every position up to the last token.
    `sample` names the tokens to draw after the last one; a prompt with n samples draws n from one row.
    """

    tokens: Sequence[int]
    start: int
    block_table: Sequence[int]
    sample: tuple[SampleRow, ...] = ()


class Runner:
    def __init__(self, decoder: Decoder, kv: Tensor, graphs: DecodeGraphs | None = None) -> None:
        """`kv` is [num_blocks, layers, 2, kv_heads, block_size, head_dim] on the decoder's device."""
        self.graphs = graphs
        self.decoder = decoder
        self.kv = kv
        self.block_size = kv.shape[4]
        self._device = kv.device

    @torch.inference_mode()
    def step(self, works: Sequence[Work]) -> list[tuple[Sampled, ...]]:
        """Run all work in one forward pass; what was drawn for each, in the order given."""
        if not works:
            return []
        order = _decode_first(works)
        batch = self._batch([works[index] for index in order])
        logits = self.graphs.run(batch) if self.graphs is not None else None
        if logits is None:
            logits = self.decoder.forward(batch, self.kv)
        rows: list[SampleRow] = []
        row_of: dict[int, int] = {}
        for index in order:
            if works[index].sample:
                row_of[index] = len(row_of)
                rows.extend(replace(draw, row=row_of[index]) for draw in works[index].sample)
        drawn = sample(logits, rows, self.decoder.kernels.sampling)
        self.synchronize()
        results: list[tuple[Sampled, ...]] = [()] * len(works)
        at = 0
        for index in row_of:
            count = len(works[index].sample)
            results[index] = tuple(drawn[at : at + count])
            at += count
        return results

    @torch.inference_mode()
    def logits(self, works: Sequence[Work]) -> Tensor:
        """Float32 [tokens of all work, vocab], in the order given: for experiments, not for serving."""
        order = _decode_first(works)
        batch = replace(self._batch([works[index] for index in order]), sampled=None)
        rows = self.decoder.forward(batch, self.kv)
        ends = np.cumsum([len(works[index].tokens) for index in order])
        spans = {index: slice(end - len(works[index].tokens), end) for index, end in zip(order, ends, strict=True)}
        self.synchronize()
        return torch.cat([rows[spans[index]] for index in range(len(works))])

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target) each; a target is never also a source."""
        for source, target in pairs:
            self.kv[target].copy_(self.kv[source])
        self.synchronize()

    def synchronize(self) -> None:
        """Return when all posted work is complete on the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _batch(self, works: Sequence[Work]) -> Batch:
        lengths = np.fromiter((len(work.tokens) for work in works), np.int64, len(works))
        starts = np.fromiter((work.start for work in works), np.int64, len(works))
        ends = np.cumsum(lengths)
        contexts = starts + lengths
        tables = self._tables(works, contexts)
        num_decode = int(np.count_nonzero(lengths == 1))
        owner = np.repeat(np.arange(len(works)), lengths)
        positions = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
        blocks = tables[owner, positions // self.block_size].astype(np.int64)
        slots = blocks * self.block_size + positions % self.block_size
        tokens = np.empty(ends[-1], np.int64)
        for work, end in zip(works, ends, strict=True):
            tokens[end - len(work.tokens) : end] = work.tokens
        is_sampled = np.fromiter((bool(work.sample) for work in works), np.bool_, len(works))
        sampled = None if len(works) == len(tokens) and is_sampled.all() else self._put(ends[is_sampled] - 1)
        return Batch(
            tokens=self._put(tokens),
            positions=self._put(positions),
            slots=self._put(slots),
            num_decode=num_decode,
            decode=self._decode_batch(contexts[:num_decode], tables[:num_decode]),
            prefill=self._prefill_batch(lengths[num_decode:], contexts[num_decode:], tables[num_decode:]),
            sampled=sampled,
        )

    def _tables(self, works: Sequence[Work], contexts: np.ndarray) -> np.ndarray:
        """int32 [works, blocks of the longest context]; what lies past a context is the null block."""
        counts = -(-contexts // self.block_size)
        tables = np.zeros((len(works), int(counts.max())), np.int32)
        for index, work in enumerate(works):
            count = int(counts[index])
            assert len(work.block_table) >= count, (len(work.block_table), count, work.start, len(work.tokens))
            tables[index, :count] = work.block_table[:count]
        return tables

    def _decode_batch(self, contexts: np.ndarray, tables: np.ndarray) -> DecodeBatch | None:
        if not len(contexts):
            return None
        return DecodeBatch(
            context_lens=self._put(contexts.astype(np.int32)),
            block_tables=self._put(tables),
            max_context=int(contexts.max()),
        )

    def _prefill_batch(self, lengths: np.ndarray, contexts: np.ndarray, tables: np.ndarray) -> PrefillBatch | None:
        if not len(lengths):
            return None
        return PrefillBatch(
            query_start=self._put(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)),
            context_lens=self._put(contexts.astype(np.int32)),
            block_tables=self._put(tables),
            max_query=int(lengths.max()),
            max_context=int(contexts.max()),
        )

    def _put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _decode_first(works: Sequence[Work]) -> list[int]:
    """Work of one token is a decode row, whatever it is part of: its attention is the same."""
    return sorted(range(len(works)), key=lambda index: len(works[index].tokens) != 1)
