"""The decode worker's book: every request here, the state of each sample, and what each holds in the pool.

Owns the transitions; does not decide who joins, yields or fits (`scheduler.py`, `room.py`).
Invariant: a sample is in exactly the list of its state, and holds blocks only while running or resuming; pending and
ready samples share their request's common blocks, which are let go when none of them is left.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Hashable

from decode_node.plan import DecodeRequest
from decode_node.samples import Common, Request, Sample, State, Work
from pdserve.blocks import BlockPool
from pdserve.computing import Computing
from pdserve.messages import Key
from pdserve.prefix import block_digests, extend
from pdserve.waiting import Waiting

MAX_PAST = 4096  # keys that are over, so that a late command does not bring them back
MAX_ENDED = 256  # samples whose cached output a late stop string may still shorten


class Book:
    def __init__(self, pool: BlockPool, max_overtakes: int) -> None:
        self.pool = pool
        self.requests: dict[Key, Request] = {}
        self.ready: list[Sample] = []  # these lists are in order of age, oldest first
        self.running: list[Sample] = []
        self.works: dict[Hashable, Work] = {}  # admitted, in order of admission
        self.preempted: list[Work] = []
        self.local: Waiting[Work] = Waiting(max_overtakes)
        self.computing = Computing()
        self.in_step = False
        self._num_arrived = 0
        self._left_in_step: list[Hashable] = []
        self._copies: list[tuple[str, Hashable]] = []  # holders of the sources of copies, until they are done
        self._reads: set[Key] = set()  # landings that are gone while a read may still write
        self._leaving: dict[Key, None] = {}
        self._past: OrderedDict[Key, None] = OrderedDict()
        self._ended: OrderedDict[tuple[Key, int], tuple[int, int, list[bytes]]] = OrderedDict()

    def arrive(self, spec: DecodeRequest, common: Common) -> Request:
        digests = block_digests(spec.tokens, self.pool.block_size, spec.extras)
        request = Request(spec, self._num_arrived, common, digests)
        request.samples = [Sample(request, at, list(spec.tokens), list(digests)) for at in range(spec.sampling.n)]
        self._num_arrived += 1
        self.requests[spec.key] = request
        return request

    def sample(self, key: Key, index: int) -> Sample | None:
        """A sample that is not over; None for anything else."""
        request = self.requests.get(key)
        if request is None or not 0 <= index < len(request.samples):
            return None
        sample = request.samples[index]
        return None if sample.state is State.DONE else sample

    # forward

    def complete(self, request: Request) -> None:
        """The common tokens' KV is here and valid."""
        request.common = Common.COMPLETE
        table, size = self.pool.table(request.key), self.pool.block_size
        for at, digest in enumerate(request.digests):
            self.pool.cache(table[at], digest, request.spec.tokens[at * size : (at + 1) * size])
        for sample in request.samples:
            self._ready_or_wait(sample)

    def accept(self, sample: Sample, token: int) -> None:
        """The next token of a sample that goes on."""
        sample.tokens.append(token)
        self._ready_or_wait(sample)

    def _ready_or_wait(self, sample: Sample) -> None:
        has_started = len(sample.tokens) > len(sample.request.spec.tokens)
        if not has_started:
            return
        if sample.state is State.PENDING and sample.request.common is Common.COMPLETE:
            sample.state = State.READY
            sample.computed = len(sample.tokens) - 1
            insort(self.ready, sample, key=lambda other: other.age)
        elif sample.state is State.EVICTED and not any(work.sample is sample for work in self.preempted):
            self._queue_again(Work(sample.request, sample, sample.tokens, sample.digests))

    def join(self, sample: Sample) -> bool:
        """A ready sample takes its table: the common one if it is the last to need it, else a share and a copy.

        False, and nothing has changed, if the copy finds no block.
        """
        request, pool = sample.request, self.pool
        num_shared, rest = divmod(len(request.spec.tokens), pool.block_size)
        if len(request.waits_for_common()) == 1:
            pool.rename(request.key, sample.holder)
            request.common = Common.GONE
        else:
            common = pool.table(request.key)
            pool.share(sample.holder, common[:num_shared])
            if rest and not pool.grow(sample.holder):
                pool.release(sample.holder)
                return False
            if rest:
                sample.copy = (common[num_shared], pool.table(sample.holder)[num_shared])
                source = ("copy", sample.holder)
                pool.share(source, [common[num_shared]])
                self._copies.append(source)
        self.ready.remove(sample)
        self.run(sample)
        return True

    def run(self, sample: Sample) -> None:
        sample.state = State.RUNNING
        sample.table = self.pool.table(sample.holder)
        insort(self.running, sample, key=lambda other: other.age)

    def finish_work(self, work: Work) -> None:
        """All its tokens are computed; the next token of each sample has been drawn and comes with `accept`."""
        del self.works[work.holder]
        self.computing.leave(work.holder)
        if work.sample is None:
            self.complete(work.request)
        else:
            work.sample.computed = len(work.tokens)
            self.run(work.sample)

    # backward

    def preempt_sample(self, sample: Sample) -> None:
        """Its blocks go, what is complete stays cached while nobody needs the room; it is computed again here."""
        self._cache(sample, sample.computed)
        self.running.remove(sample)
        self.pool.release(sample.holder)
        self._evict(sample)

    def preempt_work(self, work: Work) -> None:
        del self.works[work.holder]
        self.computing.leave(work.holder)
        self.pool.release(work.holder)
        work.computed = work.num_cached = 0
        if work.sample is None:
            work.request.common = Common.QUEUED
            self._queue_again(work)
        else:
            self._evict(work.sample)

    def preempt_common(self, request: Request) -> None:
        """Landed or prefilled, but not joined: every sample still in need of it is computed again by itself."""
        self.pool.release(request.key)
        request.common = Common.GONE
        for sample in request.waits_for_common():
            if sample.state is State.READY:
                self.ready.remove(sample)
            self._evict(sample)

    def _evict(self, sample: Sample) -> None:
        sample.state = State.EVICTED
        sample.copy, sample.table, sample.computed = None, [], 0
        sample.num_preempted += 1
        self._ready_or_wait(sample)

    def _queue_again(self, work: Work) -> None:
        insort(self.preempted, work, key=lambda other: other.age)

    # over

    def end_sample(self, sample: Sample, num_tokens: int) -> None:
        """The sample is over; of its output only what lies within the first `num_tokens` tokens may be cached."""
        request = sample.request
        if sample.state is State.RUNNING:
            self._cache(sample, min(sample.computed, num_tokens))
            self.running.remove(sample)
            self._let_go(sample.holder)
        elif sample.state is State.RESUMING:
            del self.works[sample.holder]
            self.computing.leave(sample.holder)
            self._let_go(sample.holder)
        elif sample.state is State.EVICTED:
            self.preempted = [work for work in self.preempted if work.sample is not sample]
            self.computing.leave(sample.holder)
        elif sample.state is State.READY:
            self.ready.remove(sample)
        sample.state = State.DONE
        self._forget_beyond(num_tokens, len(request.digests), sample.digests)
        if all(other.state is State.DONE for other in request.samples):
            self.remove(request)
        elif request.common is Common.COMPLETE and not request.waits_for_common():
            self._let_go(request.key)
            request.common = Common.GONE

    def remember_end(self, sample: Sample) -> None:
        """A sample that ended by itself: a stop string may turn out to have come earlier."""
        entry = (sample.num_prompt, len(sample.request.digests), sample.digests)
        self._ended[(sample.key, sample.index)] = entry
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def shorten_ended(self, key: Key, index: int, num_generated: int) -> None:
        if (key, index) in self._ended:
            num_prompt, num_common, digests = self._ended.pop((key, index))
            self._forget_beyond(num_prompt + num_generated, num_common, digests)

    def remove(self, request: Request) -> None:
        """The request is over, in whatever state; nothing more of it is cached."""
        del self.requests[request.key]
        self._leaving[request.key] = self._past[request.key] = None
        if len(self._past) > MAX_PAST:
            self._past.popitem(last=False)
        if request.common is Common.LANDING:
            if self.pool.drain(request.key):
                self._reads.add(request.key)
        elif request.common in (Common.PREFILLING, Common.COMPLETE):
            self.works.pop(request.key, None)
            self._let_go(request.key)
        elif request.common is Common.QUEUED:
            self.local.pop(request.key)
            self.preempted = [work for work in self.preempted if work.request is not request]
        self.computing.leave(request.key)
        request.common = Common.GONE
        for sample in request.samples:
            if sample.state is not State.DONE:
                self._drop(sample)

    def _drop(self, sample: Sample) -> None:
        if sample.state in (State.RUNNING, State.RESUMING):
            self._let_go(sample.holder)
            self.works.pop(sample.holder, None)
        for line in (self.ready, self.running):
            if sample in line:
                line.remove(sample)
        self.preempted = [work for work in self.preempted if work.sample is not sample]
        self.computing.leave(sample.holder)
        sample.state = State.DONE

    def _let_go(self, holder: Hashable) -> None:
        """Release, but blocks that the step in flight may write or copy stay out of the pool until it completes."""
        if not self.in_step:
            self.pool.release(holder)
        elif self.pool.drain(holder):
            self._left_in_step.append(holder)

    def read_is_over(self, key: Key) -> None:
        if key in self._reads:
            self._reads.remove(key)
            self.pool.quiescent(key)

    def begin_step(self) -> list[tuple[int, int]]:
        """The copies of the step, which is now in flight."""
        self.in_step = True
        copies = [sample.copy for sample in self.running if sample.copy is not None] if self._copies else []
        for sample in self.running if copies else ():
            sample.copy = None
        return copies

    def step_completed(self) -> None:
        self.in_step = False
        for holder in self._left_in_step:
            self.pool.quiescent(holder)
        for holder in self._copies:
            self.pool.release(holder)
        self._left_in_step.clear()
        self._copies.clear()

    # cache

    def _cache(self, sample: Sample, num_tokens: int) -> None:
        """Output is cached when a sample ends or is preempted, never while a stop string may still shorten it."""
        size, tokens = self.pool.block_size, sample.tokens
        extend(sample.digests, tokens[:num_tokens], size, sample.request.spec.extras)
        for at in range(len(sample.request.digests), num_tokens // size):
            self.pool.cache(sample.table[at], sample.digests[at], tokens[at * size : (at + 1) * size])

    def _forget_beyond(self, num_tokens: int, num_common: int, digests: list[bytes]) -> None:
        for digest in digests[max(num_tokens // self.pool.block_size, num_common) :]:
            self.pool.forget(digest)

    # leaving

    def is_past(self, key: Key) -> bool:
        """It was here and is over: an attempt never comes back."""
        return key in self._past or self.pool.is_draining(key)

    def is_gone(self, key: Key) -> bool:
        if key in self.requests or self.pool.is_draining(key):
            return False
        touched = [*self._left_in_step, *(holder for _, holder in self._copies)]
        return not any(holder == key or isinstance(holder, tuple) and holder[0] == key for holder in touched)

    def take_gone(self) -> list[Key]:
        gone = [key for key in self._leaving if self.is_gone(key)]
        for key in gone:
            del self._leaving[key]
        return gone

    def check(self) -> None:
        """Prove the invariant; an AssertionError carries the numbers."""
        self.pool.check()
        self.computing.check()
        alive = [sample for request in self.requests.values() for sample in request.samples]
        assert self.running == sorted((s for s in alive if s.state is State.RUNNING), key=lambda s: s.age), "running"
        assert self.ready == sorted((s for s in alive if s.state is State.READY), key=lambda s: s.age), "ready"
        for sample in alive:
            holds = sample.state in (State.RUNNING, State.RESUMING)
            assert self.pool.holds(sample.holder) == holds, (sample.holder, sample.state)
        for request in self.requests.values():
            assert self.pool.holds(request.key) == request.has_blocks, (request.key, request.common)
            assert not request.has_blocks or request.waits_for_common(), request.key
        if not self.requests and not self.in_step:
            counts = self.pool.counts()
            assert (counts.held, counts.landing) == (0, 0) and not self.works and not self.preempted, counts
            assert not self.local and len(self.computing) == 0, len(self.local)
