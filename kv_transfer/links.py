"""What every link between two pools offers, whatever moves the bytes.

Owns the nouns (a read and its result) and the two sides' protocols; moves nothing. Only the reader
writes into its pool, and only from `poll`. Invariant: a read started ends in exactly one result unless abandoned, and
an `ok` result means that all its bytes arrived and were validated afterwards.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.plan import MAX_GENERATION, malformed
from pdserve.messages import LinkOffer, PeerInfo

ReadId = Hashable


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRead:
    """Copy whole blocks of the peer's pool into blocks of one's own; the i-th of each list belong together."""

    read_id: ReadId  # the caller's name for it, unique among unfinished reads of a link
    sources: tuple[int, ...]
    generations: tuple[int, ...]
    destinations: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadResult:
    """How a read ended. `reason` is empty when it counts, else a short metric label (table in docs/transfer.md)."""

    read_id: ReadId
    reason: str
    num_bytes: int  # of the read when ok, else 0
    seconds: float  # from start to result

    @property
    def ok(self) -> bool:
        return not self.reason


class Reader(Protocol):
    """One peer's pool, seen through one link; used by one thread. Opened once per epoch of the peer."""

    kind: str
    num_bytes: int  # of reads that counted, in all

    @property
    def how(self) -> str:
        """The mechanism, for logs: `process_vm_readv`, `memfd`, `zeromq`."""

    @property
    def is_broken(self) -> bool:
        """The peer is gone or silent: every further read fails, so close this reader and open another one."""

    @property
    def num_pending(self) -> int:
        """Reads without a result; the engine polls while there are any."""

    @property
    def waitable(self) -> object | None:
        """A ZeroMQ socket for the engine's poller when results arrive by themselves; None when `poll` does the work."""

    def start(self, read: BlockRead) -> None:
        """Queue a read. Raises TransferError (`malformed_run`) when its lists do not fit the two pools."""

    def poll(self, budget_s: float) -> list[ReadResult]:
        """Move bytes for about `budget_s` (at least one slice when there is work) and hand over what ended."""

    def abandon(self, read_id: ReadId) -> None:
        """The read is no longer wanted; it will have no result. Unknown ids are ignored."""

    def is_quiescent(self, read_id: ReadId) -> bool:
        """Whether nothing will touch the read's destination blocks any more, on its account."""

    def close(self) -> None:
        """Let go of the peer; unfinished reads get no result and are quiescent. Idempotent."""


class Export(Protocol):
    """The owner's side of a link: serves readers from a thread of its own until closed."""

    @property
    def offer(self) -> LinkOffer:
        """What goes into PeerInfo.links."""

    @property
    def num_ignored(self) -> int:
        """Requests that were not understood or not allowed."""

    def close(self) -> None:
        """Stop serving and end the thread. Idempotent."""


class Opener(Protocol):
    """Opens a reader; may take up to a second when the peer does not answer. Raises TransferError with the reason."""

    def __call__(self, offer: LinkOffer, peer: PeerInfo) -> Reader:
        """The link's kind is `offer.kind`."""


def check_read(read: BlockRead, *, num_source_blocks: int, num_blocks: int) -> None:
    """Raises TransferError (`malformed_run`) unless the lists fit each other and the two pools."""
    if not len(read.sources) == len(read.generations) == len(read.destinations) > 0:
        raise malformed(f"{len(read.sources)} sources, {len(read.generations)}, {len(read.destinations)}")
    if min(read.sources) < 1 or max(read.sources) >= num_source_blocks:
        raise malformed(f"a source block is outside [1, {num_source_blocks})")
    if min(read.destinations) < 1 or max(read.destinations) >= num_blocks:
        raise malformed(f"a destination block is outside [1, {num_blocks})")
    if len(set(read.destinations)) != len(read.destinations):
        raise malformed("a destination block is named twice")
    if min(read.generations) < 1 or max(read.generations) > MAX_GENERATION:
        raise malformed("a generation is not a positive 64-bit number")


class Pacer:
    """How many bytes fit into one slice, from what the last ones achieved; starts low."""

    def __init__(
        self, *, slice_s: float, first_bytes: int = 2 * 1024 * 1024, most_bytes: int = 64 * 1024 * 1024
    ) -> None:
        self._slice_s = slice_s
        self._most_bytes = most_bytes
        self._bytes_per_s = first_bytes / slice_s

    @property
    def slice_bytes(self) -> int:
        return min(self._most_bytes, int(self._bytes_per_s * self._slice_s))

    def note(self, num_bytes: int, seconds: float) -> None:
        """A slice took so long: slow down at once, speed up by halves; a small one within its time says nothing."""
        if seconds <= self._slice_s and num_bytes < self.slice_bytes // 2:
            return
        achieved = num_bytes / max(seconds, 1e-6)
        weight = 1.0 if achieved < self._bytes_per_s else 0.5
        self._bytes_per_s += weight * (achieved - self._bytes_per_s)
