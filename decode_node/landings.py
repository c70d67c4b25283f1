"""Every read of KV that this worker has under way: who publishes it, through which link, and how it ends.

Owns the sessions with prefill workers, the leases to renew and one `Landing` per request; frees no block and ends no
request. Invariant: each landing begun ends in exactly one `Outcome`, or is abandoned and then told as quiescent.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from decode_node.plan import LandingPlan
from kv_transfer.connect import Connector
from kv_transfer.landing import Landing, Phase
from kv_transfer.links import BlockRead, Reader
from kv_transfer.plan import Target
from pdserve.channel import Link
from pdserve.errors import TransferError
from pdserve.messages import Key, PeerInfo, Published, ReleaseLease, Renew

EARLY_AT_MOST = 4096  # publications kept for requests that have no blocks here yet
EARLY_FOR_S = 60.0
LINK_PATIENCE_S = 3.0  # for a link that is being opened, before a landing gives up


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A landing is over. `reason` is empty when all of its KV is here and valid, else a metric label."""

    key: Key
    reason: str
    num_bytes: int


@dataclass(slots=True)
class _Owner:
    peer: PeerInfo
    link: Link


class Landings:
    def __init__(
        self, *, epoch: str, context: zmq.Context[zmq.Socket[bytes]], connector: Connector, block_bytes: int
    ) -> None:
        self._epoch = epoch
        self._context = context
        self._connector = connector
        self._block_bytes = block_bytes
        self._owners: dict[str, _Owner] = {}
        self._landings: dict[Key, Landing] = {}
        self._waiting: dict[Key, list[BlockRead]] = {}  # reads that wait for a link
        self._early: dict[Key, tuple[float, list[Published]]] = {}
        self._dropped: OrderedDict[Key, None] = OrderedDict()  # of late: whoever still publishes is told so
        self._patient_until_s: dict[Key, float] = {}  # waits for a link
        self._started: list[tuple[Key, int]] = []
        self._quiescent: list[Key] = []
        self._unwanted: set[Key] = set()  # abandoned by the node: no outcome, only quiescence
        self.rejected: Counter[str] = Counter()

    # the roster

    def roster(self, peers: Sequence[PeerInfo], now_s: float) -> None:
        """The prefill workers that live; whoever is missing is dead and its reads are over."""
        alive = {peer.epoch: peer for peer in peers}
        self._connector.update(peers, now_s)  # closes readers of the dead, so their reads are quiescent
        for epoch in [epoch for epoch in self._owners if epoch not in alive]:
            self._owners.pop(epoch).link.close()
            self._fail_all(epoch)
        for epoch, peer in alive.items():
            if epoch not in self._owners:
                link = Link(self._context, peer.endpoint, self._epoch, remote=epoch)
                self._owners[epoch] = _Owner(peer, link)

    def sockets(self) -> list[Any]:
        readers = [contact.reader for contact in self._connector.contacts() if contact.reader is not None]
        waitables = [reader.waitable for reader in readers if reader.num_pending and reader.waitable is not None]
        return [owner.link.socket for owner in self._owners.values()] + waitables

    def tick(self) -> float | None:
        times = [t for t in (owner.link.tick() for owner in self._owners.values()) if t is not None]
        return min(times) if times else None

    # landings

    def begin(self, plan: LandingPlan, owner: str, block_size: int) -> None:
        """Read what is published into the plan's blocks; a landing with nothing to read is done at once."""
        known = self._owners.get(owner)
        target = Target(
            num_tokens=plan.num_tokens,
            first_missing=plan.first_position,
            block_size=block_size,
            table=plan.blocks,
            num_source_blocks=known.peer.num_blocks if known is not None else 1,
        )
        landing = self._landings[plan.key] = Landing(key=plan.key, owner=owner, target=target)
        if not target.missing:
            landing.phase = Phase.LANDED
        elif known is None or known.link.is_stale:
            landing.fail("owner_lost")
        for published in self._early.pop(plan.key, (0.0, []))[1]:
            self._published(landing, published)

    def abandon(self, key: Key) -> None:
        """The node wants it no more: no outcome follows; `take_quiescent` names it once its blocks are safe."""
        self._early.pop(key, None)
        self._dropped[key] = None
        if len(self._dropped) > EARLY_AT_MOST:
            self._dropped.popitem(last=False)
        landing = self._landings.get(key)
        if landing is not None:
            self._unwanted.add(key)
            landing.fail("abandoned")
            self._drain(landing)

    def advance(self, now_s: float, budget_s: float) -> list[Outcome]:
        """Hear publications, move bytes for about `budget_s`, and say which landings are over."""
        for epoch, owner in self._owners.items():
            if owner.link.is_stale:  # to the owner we are dead: nothing it publishes comes any more
                self._fail_all(epoch)
            for message in owner.link.receive():
                if isinstance(message, Published):
                    self._hear(owner, message, now_s)
        self._start_waiting(now_s)
        self._move(budget_s)
        for landing in self._landings.values():
            if landing.phase is Phase.DRAINING:
                self._drain(landing)
        outcomes = []
        for landing in [each for each in self._landings.values() if each.phase in (Phase.LANDED, Phase.OVER)]:
            outcome = self._over(landing)
            if outcome is not None:
                outcomes.append(outcome)
        return outcomes

    def renew(self, now_s: float, waiting: Sequence[tuple[Key, str]] = ()) -> None:
        """One message per owner for all leases still needed, those of `waiting` (key, owner) too.

        Also forgets publications nobody came for.
        """
        wanted = [(landing.key, landing.owner) for landing in self._landings.values()]
        for epoch, owner in self._owners.items():
            keys = tuple(key for key, of in (*wanted, *waiting) if of == epoch)
            if keys:
                owner.link.send(Renew(keys=keys))
        for key in [key for key, (since_s, _) in self._early.items() if now_s > since_s + EARLY_FOR_S]:
            del self._early[key]

    def take_started(self) -> list[tuple[Key, int]]:
        """Landings whose first read was posted since the last call."""
        started, self._started = self._started, []
        return started

    def take_quiescent(self) -> list[Key]:
        """Abandoned landings whose blocks nothing can touch any more."""
        quiescent, self._quiescent = self._quiescent, []
        return quiescent

    @property
    def num_active(self) -> int:
        return len(self._landings)

    @property
    def is_moving(self) -> bool:
        """There are bytes that only `advance` moves, so the loop must not sleep."""
        readers = [contact.reader for contact in self._connector.contacts() if contact.reader is not None]
        return any(reader.num_pending and reader.waitable is None for reader in readers)

    def readers(self) -> list[tuple[PeerInfo, Reader]]:
        return [(each.peer, each.reader) for each in self._connector.contacts() if each.reader is not None]

    def close(self) -> None:
        self._connector.close()
        for owner in self._owners.values():
            owner.link.close()

    # inside

    def _fail_all(self, owner: str) -> None:
        for landing in [landing for landing in self._landings.values() if landing.owner == owner]:
            self._fail(landing, "owner_lost")

    def _hear(self, owner: _Owner, published: Published, now_s: float) -> None:
        landing = self._landings.get(published.key)
        if landing is not None:
            self._published(landing, published)
        elif published.key in self._dropped:
            owner.link.send(ReleaseLease(key=published.key))
        elif published.key in self._early:
            self._early[published.key][1].append(published)
        elif len(self._early) < EARLY_AT_MOST:
            self._early[published.key] = (now_s, [published])

    def _published(self, landing: Landing, published: Published) -> None:
        read = landing.publish(published)
        if read is not None:
            self._waiting.setdefault(landing.key, []).append(read)

    def _start_waiting(self, now_s: float) -> None:
        for key, reads in list(self._waiting.items()):
            landing = self._landings[key]
            reader = self._connector.reader(landing.owner, now_s)
            if reader is None:
                if now_s >= self._patient_until_s.setdefault(key, now_s + LINK_PATIENCE_S):
                    self._fail(landing, "no_link")
                continue
            del self._waiting[key]
            self._patient_until_s.pop(key, None)
            started_ns = time.monotonic_ns()
            try:
                for read in reads:
                    reader.start(read)
            except TransferError as error:
                self._fail(landing, error.reason)
                continue
            if reads[0].read_id[-1:] == (1,):  # type: ignore[index]
                self._started.append((key, started_ns))

    def _move(self, budget_s: float) -> None:
        end_s = time.monotonic() + budget_s
        for _, reader in self.readers():
            if reader.num_pending:
                for result in reader.poll(max(0.0, end_s - time.monotonic())):
                    key = _key_of(result.read_id)
                    if key is not None and key in self._landings:
                        self._landings[key].finish(result)

    def _fail(self, landing: Landing, reason: str) -> None:
        landing.fail(reason)
        self._drain(landing)

    def _drain(self, landing: Landing) -> None:
        """Give up reads; those that no link has, or that their link has let go, are quiescent."""
        never_started = {read.read_id for read in self._waiting.pop(landing.key, [])}
        self._patient_until_s.pop(landing.key, None)
        reader = next((reader for peer, reader in self.readers() if peer.epoch == landing.owner), None)
        for read_id in landing.outstanding:
            if read_id not in never_started and reader is not None:
                reader.abandon(read_id)
                if not reader.is_quiescent(read_id):
                    continue
            landing.quiescent(read_id)

    def _over(self, landing: Landing) -> Outcome | None:
        key = landing.key
        del self._landings[key]
        if key in self._unwanted:
            self._unwanted.discard(key)
            self._quiescent.append(key)
            return None
        owner = self._owners.get(landing.owner)
        if landing.phase is Phase.LANDED and owner is not None:
            owner.link.send(ReleaseLease(key=key))
        if landing.reason:
            self.rejected[landing.reason] += 1
        return Outcome(key=key, reason=landing.reason, num_bytes=landing.num_validated * self._block_bytes)


def _key_of(read_id: Any) -> Key | None:
    match read_id:
        case (str(request), int(attempt), int()):
            return Key(request=request, attempt=attempt)
        case _:
            return None
