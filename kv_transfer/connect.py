"""Which link leads to which peer: opens, tests and closes readers as the roster changes.

Owns the readers of one worker and the thread that opens them, since a peer that does not answer must not hold up the
engine; decides nothing about requests. Invariant: the engine only ever gets a reader that has passed its self-test
against the pool it names, for an epoch that is in the roster.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kv_transfer.links import Opener, Reader
from kv_transfer.pool import Pool
from kv_transfer.selftest import SelfTest, self_test
from pdserve.errors import TransferError
from pdserve.layout import KVLayout
from pdserve.messages import PeerInfo

log = logging.getLogger(__name__)

RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """What came of an attempt to reach a peer: a tested reader, or the reason why there is none."""

    peer: PeerInfo
    reader: Reader | None
    test: SelfTest | None
    problem: str


def connect(peer: PeerInfo, pool: Pool, layout: KVLayout, openers: Mapping[str, Opener]) -> Contact:
    """Try the peer's offers in its order, those whose kind is in `openers`; says aloud when the first one fails."""
    problems = []
    obstacle = layout.why_unreadable(peer.layout)
    if obstacle is not None:
        return Contact(peer=peer, reader=None, test=None, problem=f"its KV cannot be read here: {obstacle}")
    for offer in peer.links:
        if offer.kind not in openers:
            continue
        reader = None
        try:
            reader = openers[offer.kind](offer, peer)
            test = self_test(reader, pool, peer_num_blocks=peer.num_blocks)
            reader.num_bytes = 0  # of requests alone
        except TransferError as error:
            if reader is not None:
                reader.close()
            problems.append(f"{offer.kind}: {error}")
            continue
        if problems:
            log.warning("link to %s falls back to %s: %s", peer.name, offer.kind, "; ".join(problems))
        log.log(logging.WARNING if test.is_slow else logging.INFO, "link to %s: %s", peer.name, test)
        return Contact(peer=peer, reader=reader, test=test, problem="")
    kinds = ", ".join(offer.kind for offer in peer.links) or "none"
    none_fits = f"it offers {kinds}, wanted is {' or '.join(openers)}"
    return Contact(peer=peer, reader=None, test=None, problem="; ".join(problems) or none_fits)


class Connector:
    """The readers of one worker, by peer epoch. All methods are for the engine's thread."""

    def __init__(self, *, pool: Pool, layout: KVLayout, openers: Mapping[str, Opener]) -> None:
        """`openers` by link kind: both for --kv-link auto, one for shm or tcp."""
        self._pool, self._layout, self._openers = pool, layout, openers
        self._peers: dict[str, PeerInfo] = {}
        self._contacts: dict[str, Contact] = {}
        self._opening: set[str] = set()
        self._retry_at_s: dict[str, float] = {}
        self._wanted: queue.SimpleQueue[PeerInfo | None] = queue.SimpleQueue()
        self._opened: queue.SimpleQueue[Contact] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._open_all, name="kv-connect", daemon=True)
        self._thread.start()

    def _open_all(self) -> None:
        while (peer := self._wanted.get()) is not None:
            self._opened.put(connect(peer, self._pool, self._layout, self._openers))

    def update(self, peers: Sequence[PeerInfo], now_s: float) -> None:
        """The workers to read from, from now on. Readers of all others are closed; their reads have no result."""
        self._peers = {peer.epoch: peer for peer in peers}
        self._collect(now_s)
        for epoch in [epoch for epoch in self._contacts if epoch not in self._peers]:
            self._close(self._contacts.pop(epoch))
        for peer in peers:
            self._open(peer, now_s)

    def reader(self, epoch: str, now_s: float) -> Reader | None:
        """A tested reader of that epoch's pool; None while there is none, see `problem`."""
        self._collect(now_s)
        contact = self._contacts.get(epoch)
        if contact is not None and contact.reader is not None and contact.reader.is_broken:
            if contact.reader.num_pending:
                return contact.reader  # its reads first get their results
            self._close(self._contacts.pop(epoch))
            self._retry_at_s[epoch] = now_s + RETRY_S
            contact = None
        if (contact is None or contact.reader is None) and epoch in self._peers:
            self._open(self._peers[epoch], now_s)
        return None if contact is None else contact.reader

    def problem(self, epoch: str) -> str:
        """Why there is no reader for that epoch: what failed last, `opening` or `not in the roster`."""
        contact = self._contacts.get(epoch)
        if contact is not None:
            return contact.problem
        return "opening" if epoch in self._opening else "not in the roster"

    def contacts(self) -> list[Contact]:
        """Every peer with a tested reader: to be polled, and shown with its measured rate."""
        return [contact for contact in self._contacts.values() if contact.reader is not None]

    def close(self) -> None:
        self._wanted.put(None)
        self._thread.join()
        self._peers = {}
        self._collect(0.0)
        for contact in self._contacts.values():
            self._close(contact)
        self._contacts = {}

    def _open(self, peer: PeerInfo, now_s: float) -> None:
        contact = self._contacts.get(peer.epoch)
        is_open = contact is not None and contact.reader is not None
        if not is_open and peer.epoch not in self._opening and now_s >= self._retry_at_s.get(peer.epoch, now_s):
            self._opening.add(peer.epoch)
            self._wanted.put(peer)

    def _collect(self, now_s: float) -> None:
        while not self._opened.empty():
            contact = self._opened.get()
            epoch = contact.peer.epoch
            self._opening.discard(epoch)
            if epoch not in self._peers:
                self._close(contact)
                continue
            self._contacts[epoch] = contact
            if contact.reader is None:
                self._retry_at_s[epoch] = now_s + RETRY_S
                log.warning("no link to %s: %s", contact.peer.name, contact.problem)

    def _close(self, contact: Contact) -> None:
        self._retry_at_s.pop(contact.peer.epoch, None)
        if contact.reader is not None:
            contact.reader.close()
