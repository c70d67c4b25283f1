"""Prefill scheduler: which tokens of which prompts run in the next step. Pure: no clock, no sockets, no tensors.

Owns the queue, the running prompts and their blocks' lives in the pool, up to the end of the lease; does not compute.
Invariant: a prompt is admitted with blocks for all of it or waits, so an admitted prompt never waits for memory; a
block is cached only after the step that wrote it.

The node drives it so:

    add(prompt)                   on Prefill; False: it could never fit, report Failure(refused)
    chunks = plan(now_s)          then run the chunks in one step; is_last chunks sample the next token of each sample
    completed(chunk, now_s)       for each chunk, after the step completed on the device; False: aborted meanwhile,
                                  drop the result
    publishable(key), table(key)  after add, plan or completed: tokens that may be published now, and their blocks
    renew / release(key)          from the reader; abort(key) from the core: any time, any order, any number of times
    is_gone(key)                  nothing held, leased or draining: answer Released

`plan` may be called again before an earlier plan has completed: a prompt has at most one chunk in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.blocks import BlockPool
from pdserve.computing import Computing
from pdserve.leases import Leases
from pdserve.messages import Key
from pdserve.prefix import block_digests, max_cached_tokens
from pdserve.waiting import Rank, Verdict, Waiting
from prefill_node.plan import Chunk, Policy, PrefillConfig, Prompt


@dataclass(slots=True)
class _Request:
    prompt: Prompt
    digests: list[bytes]  # of every full block
    has_reader: bool
    computed: int = 0  # tokens in the pool, cached ones included
    num_cached: int = 0  # tokens that came from the cache
    in_flight: Chunk | None = None
    is_done: bool = False

    @property
    def remaining(self) -> int:
        return len(self.prompt.tokens) - self.computed


@dataclass(slots=True)
class _Step:
    budget: int
    chunks: list[Chunk] = field(default_factory=list)


class PrefillScheduler:
    def __init__(self, pool: BlockPool, config: PrefillConfig) -> None:
        self.pool = pool
        self.leases = Leases(pool, config.lease_ttl_s)
        self._policy: Policy = config.policy
        self._chunk_tokens = max(config.chunk_tokens, pool.block_size)  # a chunk that is not the last fills its blocks
        self._token_budget = max(config.token_budget, self._chunk_tokens)
        self._waiting: Waiting[_Request] = Waiting(config.max_overtakes)
        self._computing = Computing()
        self._requests: dict[Key, _Request] = {}  # waiting, running or leased
        self._running: dict[Key, _Request] = {}  # in order of admission
        self.num_cached_tokens = 0  # total, over all admitted prompts

    # events

    def add(self, prompt: Prompt) -> bool:
        """Queue a prompt. False: empty, or larger than the pool. A known key is ignored."""
        if prompt.key in self._requests or self.pool.is_draining(prompt.key):
            return True
        if not 0 < self.pool.blocks_for(len(prompt.tokens)) <= self.pool.usable:
            return False
        digests = block_digests(prompt.tokens, self.pool.block_size, prompt.extras)
        request = _Request(prompt, digests, prompt.has_reader)
        self._requests[prompt.key] = request
        self._waiting.add(prompt.key, request)
        return True

    def plan(self, now_s: float) -> list[Chunk]:
        """The chunks of the next step: running prompts in order of admission, then newcomers by policy."""
        self._expire(now_s)
        step = _Step(self._token_budget)
        for request in self._running.values():
            if request.in_flight is None:
                self._chunk(request, step)
        if self._waiting and step.budget >= self.pool.block_size:
            self._waiting.offer(self._rank, lambda request: self._admit(request, step))
        return step.chunks

    def completed(self, chunk: Chunk, now_s: float) -> bool:
        """The step that ran `chunk` has completed on the device: what it wrote may be read, cached and published.

        False if the request was aborted meanwhile: its blocks are free from now on and the result is void.
        """
        request = self._running.get(chunk.key)
        if request is None or request.in_flight != chunk:
            self.pool.quiescent(chunk.key)
            return False
        first_block = request.computed // self.pool.block_size
        request.in_flight = None
        request.computed += chunk.num_tokens
        self._cache(request, first_block)
        if chunk.is_last:
            self._finish(chunk.key, request, now_s)
        return True

    def renew(self, keys: Sequence[Key], now_s: float) -> list[Key]:
        """Renew leases; returns the keys that have none here any more (a prompt still in work needs no renewal)."""
        return [key for key in keys if not self.leases.renew(key, now_s) and not self._is_in_work(key)]

    def release(self, key: Key) -> None:
        """The reader has read everything, or wants nothing: no lease is needed, now or when the prompt is done."""
        request = self._requests.get(key)
        if request is None:
            return
        request.has_reader = False
        if request.is_done:
            self._forget(key)
            self.leases.release(key)

    def abort(self, key: Key) -> None:
        """The attempt is over, in whatever state. Blocks under a running chunk drain until that step completes."""
        request = self._requests.get(key)
        if request is None:
            return
        is_in_flight = request.in_flight is not None
        self._forget(key)
        self.leases.release(key)
        if is_in_flight:
            self.pool.drain(key)
        else:
            self.pool.release(key)

    # questions

    def publishable(self, key: Key) -> int:
        """Leading tokens whose KV is complete: cached ones at admission, the others as steps complete."""
        request = self._requests.get(key)
        return request.computed if request is not None and self.pool.holds(key) else 0

    def table(self, key: Key) -> list[int]:
        """The request's blocks in order; empty while it waits and after it is gone."""
        return self.pool.table(key) if self.pool.holds(key) else []

    def cached_tokens(self, key: Key) -> int:
        """Prompt tokens that came from the cache; 0 until admitted."""
        request = self._requests.get(key)
        return 0 if request is None else request.num_cached

    def is_gone(self, key: Key) -> bool:
        """No block is held, leased or draining for it, and it is not waiting."""
        return key not in self._requests and not self.pool.is_draining(key)

    def held(self) -> list[Key]:
        """Every request known here: waiting, running or leased."""
        return list(self._requests)

    def leased(self) -> list[Key]:
        return [key for key, request in self._requests.items() if request.is_done]

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def check(self) -> None:
        """Prove that every block belongs to somebody known here; for tests and idle workers."""
        self.pool.check()
        self._computing.check()
        for key, request in self._requests.items():
            assert request.is_done or self.pool.holds(key) == (key in self._running) != (key in self._waiting), key
        if not self._requests:
            counts = self.pool.counts()
            assert counts.held == 0 and len(self._computing) == 0 and not self.leases, counts

    # inside

    def _expire(self, now_s: float) -> None:
        self.leases.expire(now_s)
        for key in [key for key, request in self._requests.items() if request.is_done and key not in self.leases]:
            self._forget(key)  # reclaimed

    def _rank(self, request: _Request) -> Rank:
        if self._policy == "fcfs":
            return (request.prompt.priority,)
        return (request.prompt.priority, -self.pool.estimate_cached(request.digests))

    def _admit(self, request: _Request, step: _Step) -> Verdict:
        if step.budget < self.pool.block_size:
            return Verdict.STOP
        key, tokens = request.prompt.key, request.prompt.tokens
        servable = request.digests[: max_cached_tokens(len(tokens), self.pool.block_size) // self.pool.block_size]
        num_matched = len(self.pool.match(servable, tokens))
        if num_matched < len(servable) and self._computing.owner(servable[num_matched]) not in (None, key):
            self._computing.claim(servable[num_matched], key)
            return Verdict.DEFERRED  # another prompt computes the very next block: wait for it, do not repeat it
        cached = self.pool.admit(key, servable, tokens, self.pool.blocks_for(len(tokens)))
        if cached is None:
            self._computing.leave(key)  # what it may have inherited, a waiter that fits can compute
            return Verdict.BLOCKED
        for digest in request.digests[cached:]:
            if self._computing.owner(digest) is None:
                self._computing.claim(digest, key)
        request.computed = request.num_cached = cached * self.pool.block_size
        self.num_cached_tokens += request.num_cached
        self._running[key] = request
        self._chunk(request, step)
        return Verdict.ADMITTED

    def _chunk(self, request: _Request, step: _Step) -> None:
        start, size = request.computed, min(self._chunk_tokens, step.budget, request.remaining)
        if size < request.remaining:
            size -= (start + size) % self.pool.block_size  # whole blocks can be published and cached
        if size <= 0:
            return
        key, end = request.prompt.key, start + size
        request.in_flight = Chunk(
            key=key,
            start=start,
            tokens=tuple(request.prompt.tokens[start:end]),
            blocks=tuple(self.pool.table(key)[: self.pool.blocks_for(end)]),
            is_first=start == request.num_cached,
            is_last=end == len(request.prompt.tokens),
        )
        step.chunks.append(request.in_flight)
        step.budget -= size

    def _cache(self, request: _Request, first_block: int) -> None:
        size, table = self.pool.block_size, self.pool.table(request.prompt.key)
        for at in range(first_block, request.computed // size):
            digest = request.digests[at]
            self.pool.cache(table[at], digest, request.prompt.tokens[at * size : (at + 1) * size])
            self._computing.done(digest)

    def _finish(self, key: Key, request: _Request, now_s: float) -> None:
        del self._running[key]
        self._computing.leave(key)
        request.is_done = True
        if request.has_reader:
            self.leases.grant(key, now_s)
        else:
            self._forget(key)
            self.pool.release(key)

    def _forget(self, key: Key) -> None:
        self._requests.pop(key, None)
        self._running.pop(key, None)
        self._waiting.pop(key)
        self._computing.leave(key)

    def _is_in_work(self, key: Key) -> bool:
        request = self._requests.get(key)
        return request is not None and not request.is_done
