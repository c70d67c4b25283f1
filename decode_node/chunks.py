"""What is computed beside the decodes: local prompts and samples that were preempted, in bounded chunks.

Owns who is admitted to be computed and the chunks of each; the blocks and states change in the book.
Invariant: what was preempted is admitted oldest first and before any newcomer, and a block that several need is
computed once.
"""

from __future__ import annotations

from decode_node.book import Book
from decode_node.plan import Chunk, DecodeConfig
from decode_node.room import Room
from decode_node.samples import Common, State, Work
from pdserve.prefix import max_cached_tokens
from pdserve.waiting import Rank, Verdict

MAX_BLOCKED = 4  # waiting prompts looked at in one step that did not fit


class Chunks:
    def __init__(self, book: Book, room: Room, config: DecodeConfig) -> None:
        self._book = book
        self._room = room
        self._pool = book.pool
        self._config = config
        self._budget = 0  # tokens left in this step
        self._num_blocked = 0
        self._planned: list[Chunk] = []
        self.num_cached_tokens = 0
        self.num_recomputed_tokens = 0

    def plan(self, token_budget: int) -> list[Chunk]:
        """Chunks of what is being computed, in order of admission, then of the preempted, then of newcomers."""
        book = self._book
        self._budget, self._num_blocked, self._planned = token_budget, 0, []
        for work in list(book.works.values()):
            self._chunk(work)
        while book.preempted and self._admit(book.preempted[0]) is Verdict.ADMITTED:
            del book.preempted[0]
        if book.local and not book.preempted and self._budget > 0:
            book.local.offer(self._rank, self._admit)
        return self._planned

    def completed(self, chunk: Chunk) -> None:
        work = self._book.works.get(chunk.key if chunk.sample < 0 else (chunk.key, chunk.sample))
        if work is None or work.in_flight is not chunk:
            return
        size, table, first = (
            self._pool.block_size,
            self._pool.table(work.holder),
            work.computed // self._pool.block_size,
        )
        work.in_flight = None
        work.computed += chunk.num_tokens
        for at in range(first, min(work.computed // size, len(work.request.digests))):
            self._pool.cache(table[at], work.digests[at], work.tokens[at * size : (at + 1) * size])
            self._book.computing.done(work.digests[at])
        if work.computed == len(work.tokens):
            self._book.finish_work(work)

    @staticmethod
    def _rank(work: Work) -> Rank:
        return (work.request.spec.priority,)

    def _has_place(self) -> bool:
        book = self._book
        return len(book.running) + len(book.works) + len(book.ready) < self._config.max_running

    def _admit(self, work: Work) -> Verdict:
        if self._budget <= 0 or not self._has_place() or self._num_blocked >= MAX_BLOCKED:
            return Verdict.STOP
        size, computing, holder = self._pool.block_size, self._book.computing, work.holder
        servable = work.digests[: max_cached_tokens(len(work.tokens), size) // size]
        num_matched = len(self._pool.match(servable, work.tokens))
        if num_matched < len(servable) and computing.owner(servable[num_matched]) in self._book.works:
            computing.claim(servable[num_matched], holder)
            return Verdict.DEFERRED  # the very next block is being computed: wait for it, do not repeat it
        cached = None
        if self._room.fits(work):
            cached = self._pool.admit(holder, servable, work.tokens, self._pool.blocks_for(len(work.tokens)))
        if cached is None:
            computing.leave(holder)
            self._num_blocked += 1
            return Verdict.BLOCKED
        for digest in work.digests[cached : len(work.request.digests)]:
            if computing.owner(digest) is None:
                computing.claim(digest, holder)
        self._admitted(work, cached * size)
        self._chunk(work)
        return Verdict.ADMITTED

    def _admitted(self, work: Work, num_cached: int) -> None:
        work.computed = work.num_cached = num_cached
        self._book.works[work.holder] = work
        if work.sample is None:
            work.request.common = Common.PREFILLING
            work.request.num_cached = num_cached
            self.num_cached_tokens += num_cached
        else:
            work.sample.state = State.RESUMING
            self.num_recomputed_tokens += len(work.tokens) - num_cached

    def _chunk(self, work: Work) -> None:
        start = work.computed
        num_tokens = min(self._config.chunk_tokens, self._budget, len(work.tokens) - start)
        if num_tokens <= 0:
            return
        end = start + num_tokens
        draw: tuple[int, ...] = ()
        if end == len(work.tokens):
            pending = work.request.waits_for_common() if work.sample is None else [work.sample]
            draw = tuple(sample.index for sample in pending)
        work.in_flight = Chunk(
            key=work.request.key,
            sample=work.index,
            start=start,
            tokens=tuple(work.tokens[start:end]),
            blocks=tuple(self._pool.table(work.holder)[: self._pool.blocks_for(end)]),
            is_first=start == work.num_cached,
            draw=draw,
        )
        self._planned.append(work.in_flight)
        self._budget -= num_tokens
