"""One landing: how far the KV of one placed request has been read into this pool.

Owns which runs were published, which reads are outstanding and how it ends; moves no bytes and frees no blocks.
Invariant: it is landed only when every missing position was published, read and validated and the last run was seen;
and its blocks may be freed before that only once every read it started is quiescent.

    reading --all validated, last run seen--> landed
       |---failed read, malformed run, abort--> draining --every read quiescent--> over
"""

from __future__ import annotations

from enum import StrEnum

from kv_transfer.links import BlockRead, ReadId, ReadResult
from kv_transfer.plan import Coverage, Target, malformed
from pdserve.errors import TransferError
from pdserve.messages import Key, Published


class Phase(StrEnum):
    READING = "reading"
    LANDED = "landed"
    DRAINING = "draining"
    OVER = "over"


class Landing:
    """The reader's state for one (request, attempt); the node starts and abandons the reads it names."""

    def __init__(self, *, key: Key, owner: str, target: Target) -> None:
        self.key = key
        self.owner = owner  # epoch of the worker being read
        self.target = target
        self.phase = Phase.READING
        self.reason = ""  # why it failed, once draining: a metric label
        self._coverage = Coverage(target)
        self._outstanding: dict[ReadId, int] = {}  # blocks of each read without an end
        self._num_validated = 0  # blocks
        self._num_reads = 0
        self._is_last_seen = False

    @property
    def outstanding(self) -> list[ReadId]:
        """Reads started and not known quiescent; abandon these when draining."""
        return list(self._outstanding)

    @property
    def num_validated(self) -> int:
        """Missing blocks that are here and count."""
        return self._num_validated

    def publish(self, published: Published) -> BlockRead | None:
        """What to read now; None when the message brings nothing new. Late messages are ignored.

        An impossible run fails the landing: look at `phase` afterwards.
        """
        assert published.key == self.key, (published.key, self.key)
        if self.phase is not Phase.READING:
            return None
        try:
            fresh = self._coverage.add(published.runs)
            self._is_last_seen = self._is_last_seen or published.is_last
            if self._is_last_seen and not self._coverage.is_complete:
                raise malformed("the last run leaves positions unpublished")
        except TransferError as error:
            self.fail(error.reason)
            return None
        if not fresh:
            self._land_if_done()
            return None
        self._num_reads += 1
        read = BlockRead(
            read_id=(self.key.request, self.key.attempt, self._num_reads),
            sources=tuple(source.block for _, source in fresh),
            generations=tuple(source.generation for _, source in fresh),
            destinations=tuple(self.target.table[index] for index, _ in fresh),
        )
        self._outstanding[read.read_id] = len(fresh)
        return read

    def finish(self, result: ReadResult) -> None:
        """A read ended by itself, so it is quiescent; results of unknown reads are ignored."""
        num_blocks = self._outstanding.pop(result.read_id, None)
        if num_blocks is None:
            return
        if self.phase is Phase.DRAINING:
            self._end_if_quiescent()
        elif not result.ok:
            self.fail(result.reason)
        else:
            self._num_validated += num_blocks
            self._land_if_done()

    def fail(self, reason: str) -> None:
        """Unreadable, unwanted, or its owner is gone: from now on only draining. Ignored unless reading or landed."""
        if self.phase in (Phase.READING, Phase.LANDED):
            self.phase, self.reason = Phase.DRAINING, reason
            self._end_if_quiescent()

    def quiescent(self, read_id: ReadId) -> None:
        """An abandoned read can touch its blocks no more."""
        self._outstanding.pop(read_id, None)
        if self.phase is Phase.DRAINING:
            self._end_if_quiescent()

    def _end_if_quiescent(self) -> None:
        if not self._outstanding:
            self.phase = Phase.OVER

    def _land_if_done(self) -> None:
        if self._is_last_seen and not self._outstanding and self._num_validated == len(self.target.missing):
            self.phase = Phase.LANDED
