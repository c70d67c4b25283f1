"""Pools of other hosts, the reader's side: ask for slices within a credit window, write what is wanted.

Owns one DEALER socket of the engine's thread; only `poll` writes into the pool, so an abandoned read is quiescent at
once and its late bytes are counted and dropped. Invariant: bytes are written only for a slice asked for, still wanted,
of the size asked for, and whose trailer says that its generations held after they had left the owner's memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from kv_transfer.links import BlockRead, ReadId, ReadResult, check_read
from kv_transfer.plan import adjacent, coalesce
from kv_transfer.pool import Pool, total_blocks
from kv_transfer.tcp import OVERHEAD_BYTES, REGISTRY, SLICE_BYTES, WINDOW, Ask, Head, Trailer, slice_blocks
from pdserve.codec import MalformedError
from pdserve.errors import TransferError
from pdserve.messages import LinkOffer, PeerInfo

_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
SILENCE_S = 5.0


class _Job:
    __slots__ = ("asked", "done", "read", "started_s")

    def __init__(self, read: BlockRead, started_s: float) -> None:
        self.read = read
        self.started_s = started_s
        self.asked = 0  # blocks requested
        self.done = 0  # blocks written


class _Slice:
    """Blocks [start, end) of a job, on their way; `job` is None once nobody wants them."""

    __slots__ = ("end", "job", "start")

    def __init__(self, job: _Job, start: int, end: int) -> None:
        self.job: _Job | None = job
        self.start = start
        self.end = end


class TcpReader:
    """One peer's pool over TCP."""

    kind = "tcp"
    how = "zeromq"

    def __init__(
        self,
        pool: Pool,
        *,
        offer: LinkOffer,
        peer: PeerInfo,
        context: zmq.Context[zmq.Socket[bytes]],
        silence_s: float = SILENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connecting happens in the background; a peer that cannot be reached fails the first reads."""
        self.num_bytes = 0
        self._pool, self._epoch = pool, peer.epoch
        self._num_source_blocks = total_blocks(peer.num_blocks, pool.block_bytes)
        self._silence_s, self._clock = silence_s, clock
        self._jobs: dict[ReadId, _Job] = {}  # in order of arrival
        self._slices: dict[int, _Slice] = {}  # in flight: at most WINDOW
        self._next_slice = 0
        self._heard_s = clock()
        self._lost = ""  # why every further read fails
        self._dealer = context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.LINGER, 0)
        self._dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        self._dealer.setsockopt(zmq.SNDHWM, 2 * WINDOW)
        self._dealer.setsockopt(zmq.MAXMSGSIZE, max(SLICE_BYTES, pool.block_bytes) + OVERHEAD_BYTES)
        self._monitor = self._dealer.get_monitor_socket(_LOST)
        try:
            self._dealer.connect(offer.address)
        except zmq.ZMQError as error:
            self.close()
            raise TransferError(f"{offer.address} is no address: {error}", reason="peer_gone") from error

    @property
    def is_broken(self) -> bool:
        return bool(self._lost)

    @property
    def num_pending(self) -> int:
        return len(self._jobs)

    @property
    def waitable(self) -> object:
        return self._dealer

    def start(self, read: BlockRead) -> None:
        check_read(read, num_source_blocks=self._num_source_blocks, num_blocks=self._pool.total_blocks)
        self._jobs[read.read_id] = _Job(read, self._clock())
        self._ask()

    def poll(self, budget_s: float) -> list[ReadResult]:
        results: list[ReadResult] = []
        end_s = self._clock() + budget_s
        while not self._lost:
            try:
                frames = self._dealer.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            self._heard_s = self._clock()
            self._take(frames, results)
            self._ask()
            if self._clock() >= end_s:
                break
        self._notice_loss()
        if self._lost:
            results += [self._end(job, self._lost) for job in list(self._jobs.values())]
        return results

    def _notice_loss(self) -> None:
        while not self._monitor.closed and self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            self._lost = self._lost or "peer_gone"
        if self._slices and self._clock() - self._heard_s > self._silence_s:
            self._lost = self._lost or "timeout"

    def _ask(self) -> None:
        """Request slices, oldest read first, while the window has room."""
        most = slice_blocks(self._pool.block_bytes)
        for job in self._jobs.values():
            read = job.read
            while job.asked < len(read.sources) and len(self._slices) < WINDOW and not self._lost:
                start, end = job.asked, min(len(read.sources), job.asked + most)
                ask = Ask(
                    slice_id=self._next_slice,
                    epoch=self._epoch,
                    blocks=read.sources[start:end],
                    generations=read.generations[start:end],
                )
                try:
                    self._dealer.send(REGISTRY.encode(ask), zmq.NOBLOCK)
                except zmq.Again:  # the peer takes nothing: silence ends it
                    return
                if not self._slices:
                    self._heard_s = self._clock()
                self._slices[self._next_slice] = _Slice(job, start, end)
                self._next_slice += 1
                job.asked = end

    def _take(self, frames: Sequence[Any], results: list[ReadResult]) -> None:
        try:
            head = REGISTRY.decode(frames[0].buffer)
            trailer = REGISTRY.decode(frames[-1].buffer) if len(frames) > 1 else None
        except MalformedError:
            head = trailer = None
        found = self._slices.pop(head.slice_id, None) if isinstance(head, Head) else None
        if found is None or found.job is None:  # not understood, or late for a read that was abandoned
            return
        reason = head.reason
        if not reason:
            is_whole = isinstance(trailer, Trailer) and trailer.slice_id == head.slice_id
            reason = trailer.reason if is_whole and trailer is not None else "malformed_reply"
        reason = reason or self._write(found.job, found, frames[1:-1])
        if reason:
            results.append(self._end(found.job, reason))
        elif found.job.done == len(found.job.read.sources):
            results.append(self._end(found.job, ""))

    def _write(self, job: _Job, found: _Slice, payload: Sequence[Any]) -> str:
        """Copy the frames, one per stretch of consecutive source blocks, to their destinations."""
        size, read = self._pool.block_bytes, job.read
        sources, destinations = read.sources[found.start : found.end], read.destinations[found.start : found.end]
        stretches = adjacent(sources)
        if [len(frame) for frame in payload] != [count * size for _, count in stretches]:
            return "malformed_reply"
        pieces = deque(coalesce(sources, destinations))
        for frame, (_, count) in zip(payload, stretches, strict=True):
            data = np.frombuffer(frame.buffer, dtype=np.uint8)
            taken = 0
            while taken < count:
                piece = pieces.popleft()
                part = data[taken * size : (taken + piece.count) * size]
                self._pool.write(piece.destination, part)
                taken += piece.count
        job.done += found.end - found.start
        return ""

    def _end(self, job: _Job, reason: str) -> ReadResult:
        self.abandon(job.read.read_id)
        result = ReadResult(
            read_id=job.read.read_id,
            reason=reason,
            num_bytes=0 if reason else job.done * self._pool.block_bytes,
            seconds=self._clock() - job.started_s,
        )
        self.num_bytes += result.num_bytes
        return result

    def abandon(self, read_id: ReadId) -> None:
        job = self._jobs.pop(read_id, None)
        for each in self._slices.values():
            if each.job is job:
                each.job = None

    def is_quiescent(self, read_id: ReadId) -> bool:
        return read_id not in self._jobs

    def close(self) -> None:
        self._lost = self._lost or "closed"
        self._jobs.clear()
        if not self._dealer.closed:
            self._dealer.disable_monitor()
            self._monitor.close(linger=0)
            self._dealer.close(linger=0)


def open_tcp(offer: LinkOffer, peer: PeerInfo, pool: Pool, *, context: zmq.Context[zmq.Socket[bytes]]) -> TcpReader:
    """Raises TransferError (`peer_gone`) for an address that cannot be one; the rest shows at the first read."""
    return TcpReader(pool, offer=offer, peer=peer, context=context)
