"""Pools of one host, the reader's side: copy blocks out of another process's memory and validate them.

Owns the handshake with the owner's socket and the copies, in slices bounded in time; a copy is synchronous, so nothing
is ever in flight between two calls. Invariant: after each slice, the peer is known not to have exited (so its pid named
no other process meanwhile) before generations are compared; whatever fails any check is a failed read with a reason.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from kv_transfer.copiers import Copier, MappedCopier, ProcessCopier, reason_of
from kv_transfer.header import HeaderView
from kv_transfer.links import BlockRead, Pacer, ReadId, ReadResult, check_read
from kv_transfer.pool import Pool
from kv_transfer.shm import MAX_PACKET_BYTES, PROBE_BYTES, REGISTRY, Ask, HandOut, peer_credentials
from kv_transfer.syscalls import IOV_MAX, one_iovec, read_process
from pdserve.codec import MalformedError
from pdserve.errors import TransferError
from pdserve.messages import LinkOffer, PeerInfo

_ANSWER_TIMEOUT_S = 1.0


class _Job:
    __slots__ = ("done", "read", "started_s")

    def __init__(self, read: BlockRead, started_s: float) -> None:
        self.read = read
        self.started_s = started_s
        self.done = 0  # blocks copied


class ShmReader:
    """One peer's pool on this host. Made by `open_shm`; takes over `pidfd`."""

    kind = "shm"

    def __init__(
        self,
        pool: Pool,
        *,
        copier: Copier,
        header: HeaderView,
        hand_out: HandOut,
        pidfd: int,
        slice_s: float,
    ) -> None:
        self.num_bytes = 0
        self._pool, self._copier, self._header = pool, copier, header
        self._epoch, self._num_source_blocks = hand_out.epoch, hand_out.total_blocks
        self.address = hand_out.address  # of the pool in the peer's process
        self._pidfd: int | None = pidfd
        self._exit = select.poll()
        self._exit.register(pidfd, select.POLLIN)
        self._jobs: deque[_Job] = deque()
        self._pacer = Pacer(slice_s=slice_s)

    @property
    def how(self) -> str:
        return self._copier.how

    @property
    def is_broken(self) -> bool:
        return self._pidfd is None or bool(self._exit.poll(0))

    @property
    def num_pending(self) -> int:
        return len(self._jobs)

    @property
    def waitable(self) -> None:
        return None

    def start(self, read: BlockRead) -> None:
        check_read(read, num_source_blocks=self._num_source_blocks, num_blocks=self._pool.total_blocks)
        self._jobs.append(_Job(read, time.monotonic()))

    def poll(self, budget_s: float) -> list[ReadResult]:
        results: list[ReadResult] = []
        end_s = time.monotonic() + budget_s
        while self._jobs:
            job = self._jobs[0]
            reason = self._slice(job)
            if reason or job.done == len(job.read.sources):
                self._jobs.popleft()
                results.append(self._result(job, reason))
            if time.monotonic() >= end_s:
                break
        return results

    def _slice(self, job: _Job) -> str:
        """Copy the next blocks of a read, then check everything copied for it so far."""
        read, start = job.read, job.done
        end = min(len(read.sources), start + max(1, min(IOV_MAX, self._pacer.slice_bytes // self._pool.block_bytes)))
        began_s = time.monotonic()
        reason = self._copier.copy(read.sources[start:end], read.destinations[start:end])
        if reason or self.is_broken:
            return reason or "peer_gone"
        self._pacer.note((end - start) * self._pool.block_bytes, time.monotonic() - began_s)
        job.done = end
        return self._header.why_invalid(self._epoch, read.sources[:end], read.generations[:end]) or ""

    def _result(self, job: _Job, reason: str) -> ReadResult:
        result = ReadResult(
            read_id=job.read.read_id,
            reason=reason,
            num_bytes=0 if reason else job.done * self._pool.block_bytes,
            seconds=time.monotonic() - job.started_s,
        )
        self.num_bytes += result.num_bytes
        return result

    def abandon(self, read_id: ReadId) -> None:
        self._jobs = deque(job for job in self._jobs if job.read.read_id != read_id)

    def is_quiescent(self, read_id: ReadId) -> bool:
        return all(job.read.read_id != read_id for job in self._jobs)

    def close(self) -> None:
        self._jobs.clear()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    pid: int
    pidfd: int
    hand_out: HandOut
    fds: list[int]


def open_shm(offer: LinkOffer, peer: PeerInfo, pool: Pool, *, slice_s: float = 0.002) -> ShmReader:
    """Shake hands with the owner behind `offer` and show that its memory can be read.

    Raises TransferError: peer_gone, pid_namespace, permission, epoch, layout, malformed_reply, bad_header or bad_pool.
    """
    with ExitStack() as stack:
        answer = _shake_hands(offer, peer.epoch, stack)
        hand_out = answer.hand_out
        if hand_out.epoch != peer.epoch:
            raise TransferError(f"{offer.address} is epoch {hand_out.epoch}, not {peer.epoch}", reason="epoch")
        theirs, ours = (hand_out.num_blocks, hand_out.block_bytes), (peer.num_blocks, pool.block_bytes)
        if theirs != ours or hand_out.total_blocks < hand_out.num_blocks:
            raise TransferError(f"(blocks, bytes) of the pool are {theirs}, not {ours}", reason="layout")
        header = HeaderView(answer.fds[0], total_blocks=hand_out.total_blocks)
        copier: Copier
        if hand_out.has_pool_fd:
            copier = MappedCopier(pool, fd=answer.fds[1], total_blocks=hand_out.total_blocks)
        else:
            _probe(answer)
            copier = ProcessCopier(pool, pid=answer.pid, address=hand_out.address)
        pidfd = os.dup(answer.pidfd)
        return ShmReader(pool, copier=copier, header=header, hand_out=hand_out, pidfd=pidfd, slice_s=slice_s)


def _shake_hands(offer: LinkOffer, epoch: str, stack: ExitStack) -> _Answer:
    """Ask the owner; `stack` closes every descriptor. The pidfd is older than the answer, so it is of the answerer."""
    try:
        client = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        client.settimeout(_ANSWER_TIMEOUT_S)
        client.connect(offer.address)
        pid, uid = peer_credentials(client)
        if uid != os.geteuid():
            raise TransferError(f"{offer.address} belongs to user {uid}", reason="permission")
        if pid == 0:
            raise TransferError(f"{offer.address} is in another PID namespace", reason="pid_namespace")
        pidfd = os.pidfd_open(pid)
        stack.callback(os.close, pidfd)
        client.send(REGISTRY.encode(Ask(epoch=epoch)))
        data, fds, _, _ = socket.recv_fds(client, MAX_PACKET_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise TransferError(f"{offer.address} does not answer: {error}", reason="peer_gone") from error
    for fd in fds:
        stack.callback(os.close, fd)
    try:
        hand_out = REGISTRY.decode(data)
    except MalformedError as error:
        raise TransferError(f"{offer.address} answered nonsense: {error}", reason="malformed_reply") from error
    is_sound = isinstance(hand_out, HandOut) and all(
        0 < at < 2**63 for at in (hand_out.address, hand_out.probe_address)
    )
    if not is_sound or len(fds) != 1 + hand_out.has_pool_fd:
        raise TransferError(f"{offer.address} answered {hand_out!r:.80}, {len(fds)} fds", reason="malformed_reply")
    return _Answer(pid=pid, pidfd=pidfd, hand_out=hand_out, fds=fds)


def _probe(answer: _Answer) -> None:
    """Show that the pid, as this process knows it, is the owner's, and that its memory may be read."""
    found, hand_out = np.zeros(PROBE_BYTES, dtype=np.uint8), answer.hand_out
    local, remote = one_iovec(found.ctypes.data, PROBE_BYTES), one_iovec(hand_out.probe_address, PROBE_BYTES)
    try:
        copied = read_process(answer.pid, local, remote)
    except OSError as error:
        advice = "is its supervisor named by PR_SET_PTRACER, or is the call filtered?"
        raise TransferError(f"cannot read process {answer.pid}: {error} ({advice})", reason=reason_of(error)) from error
    if copied != PROBE_BYTES or found.tobytes() != hand_out.probe:
        raise TransferError(f"process {answer.pid} is not the owner of the pool", reason="pid_namespace")
