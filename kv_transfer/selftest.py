"""Does a link move real blocks, unharmed, and how fast? Asked at first contact of two workers and by `pdserve doctor`.

Owns the measurement; touches only the peer's test blocks, whose content is known, and this pool's scratch blocks, so no
live block is disturbed. Invariant: a link passes only when the bytes that arrived are the ones expected.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from kv_transfer.links import BlockRead, Reader
from kv_transfer.offers import openers
from kv_transfer.pool import Pool, num_test_blocks, pattern_of
from kv_transfer.stand_in import StandIn
from pdserve.channel import new_epoch
from pdserve.errors import TransferError
from pdserve.layout import KVLayout

ROUNDS = 3
TIMEOUT_S = 2.0
LEAST_SHARE = {"shm": 0.1, "tcp": 0.005}  # of a plain copy in this process; below it the link is called slow


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """A link that works. Rates are the best of three rounds, in bytes per second, in the direction used."""

    kind: str
    how: str
    num_bytes: int  # per round
    bytes_per_s: float
    memcpy_bytes_per_s: float  # the same bytes copied within this process, in the same minute

    @property
    def is_slow(self) -> bool:
        return self.bytes_per_s < LEAST_SHARE[self.kind] * self.memcpy_bytes_per_s

    def __str__(self) -> str:
        rates = f"{self.bytes_per_s / 1e9:.2f} GB/s, a plain copy here {self.memcpy_bytes_per_s / 1e9:.2f} GB/s"
        return f"{self.kind} ({self.how}): {rates}{', slower than it should be' if self.is_slow else ''}"


def self_test(reader: Reader, pool: Pool, *, peer_num_blocks: int) -> SelfTest:
    """Read the peer's test blocks into `pool`'s scratch blocks, compare, and time it.

    Raises TransferError: `self_test` when the bytes differ or do not arrive in time, else the read's own reason.
    """
    count = num_test_blocks(pool.block_bytes)
    read = BlockRead(
        read_id="self-test",
        sources=tuple(range(peer_num_blocks, peer_num_blocks + count)),
        generations=(1,) * count,
        destinations=tuple(pool.scratch_blocks),
    )
    first = pool.scratch_blocks.start
    expected = np.concatenate([pattern_of(index, pool.block_bytes) for index in range(count)])
    best_s = float("inf")
    for _ in range(ROUNDS):
        pool.write(first, np.zeros_like(expected))
        best_s = min(best_s, _timed(reader, read))
        if not np.array_equal(pool.read(first, count), expected):
            raise TransferError(f"{reader.kind} ({reader.how}) delivers other bytes than were sent", reason="self_test")
    return SelfTest(
        kind=reader.kind,
        how=reader.how,
        num_bytes=len(expected),
        bytes_per_s=len(expected) / best_s,
        memcpy_bytes_per_s=_memcpy_rate(pool),
    )


def _timed(reader: Reader, read: BlockRead) -> float:
    poller: Any = zmq.Poller() if reader.waitable is not None else None
    if poller is not None:
        poller.register(reader.waitable, zmq.POLLIN)
    began_s = time.monotonic()
    reader.start(read)
    while time.monotonic() < began_s + TIMEOUT_S:
        for result in reader.poll(TIMEOUT_S):
            if not result.ok:
                raise TransferError(f"{reader.kind} ({reader.how}): {result.reason}", reason=result.reason)
            return max(result.seconds, 1e-9)
        if poller is not None:
            poller.poll(20)
    reader.abandon(read.read_id)
    raise TransferError(f"{reader.kind} ({reader.how}): nothing within {TIMEOUT_S:.0f} s", reason="self_test")


def _memcpy_rate(pool: Pool) -> float:
    count = len(pool.test_blocks)
    source = pool.read(pool.test_blocks.start, count).copy()
    best_s = float("inf")
    for _ in range(ROUNDS):
        began_s = time.monotonic()
        pool.write(pool.scratch_blocks.start, source)
        best_s = min(best_s, time.monotonic() - began_s)
    return len(source) / max(best_s, 1e-9)


_DOCTOR_LAYOUT = KVLayout(
    model="self-test", dtype="bfloat16", num_layers=32, num_kv_heads=4, head_dim=64, block_size=16
)


def describe() -> Iterator[str]:
    """One line per link of this machine, measured between this process and another one."""
    pool = Pool(num_blocks=4, block_bytes=_DOCTOR_LAYOUT.block_bytes, epoch=new_epoch())
    yield f"KV pool pages: {pool.memory.page_kind}{f', a memfd: {pool.why_shared}' if pool.why_shared else ''}"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with tempfile.TemporaryDirectory(prefix="pdserve-doctor-") as folder:
        for kind, opener in openers(pool, kinds="auto", context=context, slice_s=1.0).items():
            try:
                with StandIn(kind, Path(folder), layout=_DOCTOR_LAYOUT, num_blocks=4, shared=None) as other:
                    reader = opener(other.peer.links[0], other.peer)
                    test = self_test(reader, pool, peer_num_blocks=other.peer.num_blocks)
                    reader.close()
            except TransferError as error:
                yield f"{kind} does not work: {error}"
            else:
                yield str(test)
    context.term()
    pool.close()
