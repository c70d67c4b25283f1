"""What the core has promised on each worker: blocks, samples and prompt tokens per placement.

Owns reservations, not decisions; the workers own the truth about blocks. Conservative: an entry stays until the worker
says the attempt is released, or its epoch is dead. Invariant: every total is the sum of its entries, never negative.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.messages import Key


@dataclass(slots=True, kw_only=True)
class Entry:
    blocks: int
    num_samples: int = 0  # that decode here
    queued_tokens: int = 0  # prompt tokens to compute here, until they are
    is_landing: bool = False  # its KV is still arriving from another worker
    since_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Book:
    """One worker's entries and their totals."""

    num_blocks: int  # that a request can get: the pool without its null block
    entries: dict[Key, Entry] = field(default_factory=dict)
    blocks: int = 0
    landing_blocks: int = 0
    num_samples: int = 0
    queued_tokens: int = 0

    @property
    def free_blocks(self) -> int:
        return self.num_blocks - self.blocks

    @property
    def used_share(self) -> float:
        return self.blocks / self.num_blocks if self.num_blocks else 1.0

    def add(self, entry: Entry, sign: int) -> None:
        self.blocks += sign * entry.blocks
        self.num_samples += sign * entry.num_samples
        self.queued_tokens += sign * entry.queued_tokens
        self.landing_blocks += sign * entry.blocks if entry.is_landing else 0


class Ledger:
    def __init__(self) -> None:
        self._books: dict[str, Book] = {}

    def open(self, epoch: str, num_blocks: int) -> None:
        self._books[epoch] = Book(num_blocks=num_blocks)

    def close(self, epoch: str) -> None:
        """The epoch is dead; so is everything it held."""
        self._books.pop(epoch, None)

    def book(self, epoch: str) -> Book:
        return self._books[epoch]

    def reserve(self, epoch: str, key: Key, entry: Entry) -> None:
        book = self._books[epoch]
        assert key not in book.entries, (epoch, key)
        book.entries[key] = entry
        book.add(entry, 1)

    def grow(self, epoch: str, key: Key, num_blocks: int) -> None:
        """A stream has grown into more blocks."""
        if entry := self._entry(epoch, key):
            book = self._books[epoch]
            entry.blocks += num_blocks
            book.blocks += num_blocks
            if entry.is_landing:
                book.landing_blocks += num_blocks

    def prefilled(self, epoch: str, key: Key) -> bool:
        """The prompt is computed; True if that is news."""
        entry = self._entry(epoch, key)
        if entry is None or entry.queued_tokens == 0:
            return False
        self._books[epoch].queued_tokens -= entry.queued_tokens
        entry.queued_tokens = 0
        return True

    def landed(self, epoch: str, key: Key) -> bool:
        """The KV is validated; True if that is news."""
        entry = self._entry(epoch, key)
        if entry is None or not entry.is_landing:
            return False
        entry.is_landing = False
        self._books[epoch].landing_blocks -= entry.blocks
        return True

    def release(self, epoch: str, key: Key) -> bool:
        """The worker holds nothing for this attempt any more; False if that was known."""
        book = self._books.get(epoch)
        entry = book.entries.pop(key, None) if book else None
        if book is None or entry is None:
            return False
        book.add(entry, -1)
        return True

    def holds(self, epoch: str, key: Key) -> bool:
        return self._entry(epoch, key) is not None

    def is_empty(self, epoch: str) -> bool:
        book = self._books.get(epoch)
        return book is None or not book.entries

    @property
    def num_entries(self) -> int:
        return sum(len(book.entries) for book in self._books.values())

    def _entry(self, epoch: str, key: Key) -> Entry | None:
        book = self._books.get(epoch)
        return book.entries.get(key) if book else None

    def check(self) -> None:
        for epoch, book in self._books.items():
            entries = book.entries.values()
            expected = (
                sum(entry.blocks for entry in entries),
                sum(entry.blocks for entry in entries if entry.is_landing),
                sum(entry.num_samples for entry in entries),
                sum(entry.queued_tokens for entry in entries),
            )
            actual = (book.blocks, book.landing_blocks, book.num_samples, book.queued_tokens)
            assert actual == expected, (epoch, actual, expected)
            assert min(actual) >= 0, (epoch, actual)
            assert all(entry.blocks >= 0 and entry.queued_tokens >= 0 for entry in entries), (epoch, book.entries)
