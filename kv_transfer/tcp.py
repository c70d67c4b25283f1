"""Pools of other hosts, the owner's side: a block server over ZeroMQ.

Owns one ROUTER socket and its thread; a read request *is* the credit for its one bounded reply, so memory is bounded by
the readers' windows. Each part goes out as a copy taken from the pool, and the generations are compared after the last
copy, in a trailer. Invariant: whatever arrives, well-formed or not, is answered or counted; nothing raises in the loop.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import zmq

from kv_transfer.plan import MAX_GENERATION, adjacent
from kv_transfer.pool import Pool
from pdserve.codec import MalformedError, Registry
from pdserve.errors import ConfigError
from pdserve.messages import LinkOffer

WINDOW = 4  # requests a reader keeps in flight
SLICE_BYTES = 1024 * 1024
_MOST_BLOCKS = 1024
MAX_REQUEST_BYTES = 64 * 1024
OVERHEAD_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Reader -> owner: send these blocks; at most `slice_blocks` of them."""

    slice_id: int  # the reader's own number, echoed
    epoch: str
    blocks: tuple[int, ...]
    generations: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Owner -> reader: first frame of a reply. With a reason it is the only one: nothing was read."""

    slice_id: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trailer:
    """Owner -> reader: last frame, after one frame per stretch of consecutive blocks; empty reason: all of it holds."""

    slice_id: int
    reason: str


REGISTRY = Registry(version=1, tags={1: Ask, 2: Head, 3: Trailer})


def slice_blocks(block_bytes: int) -> int:
    """How many blocks one reply may carry."""
    return max(1, min(_MOST_BLOCKS, SLICE_BYTES // block_bytes))


class TcpExport:
    """Serves blocks from a daemon thread until closed."""

    def __init__(
        self, pool: Pool, *, context: zmq.Context[zmq.Socket[bytes]], bind: str, advertise_host: str = ""
    ) -> None:
        """`bind` like tcp://127.0.0.1:0. Raises ConfigError when the address cannot be bound."""
        self._pool = pool
        self._num_ignored = 0
        self._router = context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self._router.setsockopt(zmq.SNDHWM, 2 * WINDOW)
        self._router.setsockopt(zmq.RCVHWM, 2 * WINDOW)
        try:
            self._router.bind(bind)
        except zmq.ZMQError as error:
            self._router.close()
            raise ConfigError(f"cannot serve KV blocks on {bind}: {error}") from error
        endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._endpoint = f"tcp://{advertise_host}:{endpoint.rsplit(':', 1)[1]}" if advertise_host else endpoint
        self._stop, stopped = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._stop.bind(f"inproc://kv-export-{id(self)}")
        stopped.connect(f"inproc://kv-export-{id(self)}")
        self._thread = threading.Thread(target=self._serve, args=(stopped,), name="tcp-export", daemon=True)
        self._thread.start()

    @property
    def offer(self) -> LinkOffer:
        return LinkOffer(kind="tcp", address=self._endpoint)

    @property
    def num_ignored(self) -> int:
        return self._num_ignored

    def close(self) -> None:
        if self._stop.closed:
            return
        self._stop.send(b"")
        self._thread.join()
        self._stop.close(linger=0)

    def _serve(self, stopped: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(stopped, zmq.POLLIN)
        while stopped not in dict(poller.poll()):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
                if len(frames) != 2:
                    raise MalformedError(f"{len(frames)} frames")
                self._answer(frames[0], self._checked(REGISTRY.decode(frames[1])))
            except (MalformedError, zmq.ZMQError):  # nonsense, a reader that left, or one beyond its window
                self._num_ignored += 1
        stopped.close(linger=0)
        self._router.close(linger=0)

    def _checked(self, ask: object) -> Ask:
        if not isinstance(ask, Ask) or not 0 <= ask.slice_id < 2**63:
            raise MalformedError("not a read request")
        if not 0 < len(ask.blocks) == len(ask.generations) <= slice_blocks(self._pool.block_bytes):
            raise MalformedError(f"{len(ask.blocks)} blocks with {len(ask.generations)} generations")
        if min(ask.blocks) < 1 or max(ask.blocks) >= self._pool.total_blocks:
            raise MalformedError("a block id is out of range")
        if min(ask.generations) < 1 or max(ask.generations) > MAX_GENERATION:
            raise MalformedError("a generation is out of range")
        return ask

    def _answer(self, reader: bytes, ask: Ask) -> None:
        """Frames leave together at the last one; each is copied out of the pool as it is handed to ZeroMQ."""
        header = self._pool.header
        reason = header.why_invalid(ask.epoch, ask.blocks, ask.generations) or ""
        head = REGISTRY.encode(Head(slice_id=ask.slice_id, reason=reason))
        self._router.send(reader, zmq.SNDMORE | zmq.NOBLOCK)
        if reason:
            self._router.send(head, zmq.NOBLOCK)
            return
        self._router.send(head, zmq.SNDMORE | zmq.NOBLOCK)
        for first, count in adjacent(ask.blocks):
            self._router.send(self._pool.read(first, count).data, zmq.SNDMORE | zmq.NOBLOCK, copy=True)
        reason = header.why_invalid(ask.epoch, ask.blocks, ask.generations) or ""
        self._router.send(REGISTRY.encode(Trailer(slice_id=ask.slice_id, reason=reason)), zmq.NOBLOCK)
