"""Decode scheduler: which samples step next, what is prefilled beside them, who yields. Pure: no clock, no tensors.

Owns the order of everything on a decode worker; `book.py` has the transitions, `room.py` the memory policy.
Invariant: a step decodes every running sample that has a place for its next token; the oldest never loses its place.

The node drives it so:

    fits_ever(request)               on Land: False is Failure(refused)
    reserve_landing(request)         on Land with an owner: read into the plan's blocks. None: no room yet, ask again
                                     after each step, until it lands or `take_gone` names it
    landing_done(key)                the last read is validated; at once if there is nothing to read
    landing_failed(key)              all reads have ended and the KV is void; report Failure, the request is forgotten
    add(request)                     on Land without an owner: prefill here. False: never
    start(key, sample, pos, token)   on Start, before or after the landing
    drop(key) / drop_sample(...)     from the core, in any state, any number of times
    quiescent(key)                   no read into blocks of a dropped, failed or yielded landing is outstanding

    plan = plan(now_s)               while has_work(). Do plan.copies in order, then run plan.decodes and plan.chunks as
                                     one step; for each of plan.yielded stop the read, report it, and call
                                     quiescent(key) when it has stopped
    completed(plan)                  after the step completed on the device, before its tokens are told
    token_sampled(key, sample, position, token)     for each decode, and each sample in `draw` of a chunk
    take_gone()                      keys of which nothing is held, landing or draining any more: send Released

Between `plan` and `completed` every event but `plan` may come; blocks the step may touch drain until it completes.
An empty plan need not run, but `completed` must be called for it too.
"""

from __future__ import annotations

from decode_node.book import Book
from decode_node.chunks import Chunks
from decode_node.plan import DecodeConfig, DecodePlan, DecodeRequest, LandingPlan
from decode_node.room import Room
from decode_node.samples import Common, Request, Sample, State, Work
from pdserve.blocks import BlockPool
from pdserve.forecast import Forecast
from pdserve.messages import Key
from pdserve.request import FinishReason


class DecodeScheduler:
    def __init__(self, pool: BlockPool, config: DecodeConfig, forecast: Forecast | None = None) -> None:
        self.pool = pool
        self.forecast = Forecast() if forecast is None else forecast
        self._config = config
        self._book = Book(pool, config.max_overtakes)
        self._room = Room(self._book, config, self.forecast)
        self._chunks = Chunks(self._book, self._room, config)
        self._num_cached_tokens = 0
        self.num_preemptions = 0

    # arriving

    def fits_ever(self, request: DecodeRequest) -> bool:
        """Whether the request, alone, could be served to its last token."""
        return len(request.tokens) > 0 and self._room.footprint(request) <= self.pool.usable

    def reserve_landing(self, request: DecodeRequest) -> LandingPlan | None:
        """Pin the leading blocks that are cached here and take the rest to read into.

        None: no room yet, ask again after the next step. Who asked first is served first, and nobody before what was
        preempted here is back. Asking again for a landing under way gives its plan again.
        """
        known = self._book.requests.get(request.key)
        if known is None:
            if self._book.is_past(request.key) or not self.fits_ever(request):
                return None
            known = self._book.arrive(request, Common.ASKING)
        if known.common is Common.ASKING:
            asking = (other for other in self._book.requests.values() if other.common is Common.ASKING)
            if next(asking) is known and not self._book.preempted and self._may_land(known):
                self._take_landing(known)
        return self._landing_plan(known) if known.common is Common.LANDING else None

    def _take_landing(self, landing: Request) -> None:
        spec = landing.spec
        num_blocks = self._room.landing_blocks(spec)
        cached = self.pool.admit(spec.key, landing.digests, spec.tokens, num_blocks, landing=True)
        if cached is not None:
            landing.common = Common.LANDING
            landing.num_cached = cached * self.pool.block_size
            self._num_cached_tokens += landing.num_cached

    def _may_land(self, landing: Request) -> bool:
        counts, spec = self.pool.counts(), landing.spec
        if counts.landing:
            cached = self.pool.estimate_cached(landing.digests)
            most = int(self._config.landing_share * self.pool.usable)
            if counts.landing + self._room.landing_blocks(spec) - cached > most:
                return False
        return self._room.fits(landing)

    def _landing_plan(self, landing: Request) -> LandingPlan:
        return LandingPlan(
            key=landing.key,
            first_position=landing.num_cached,
            num_tokens=len(landing.spec.tokens),
            blocks=tuple(self.pool.table(landing.key)),
        )

    def landing_done(self, key: Key) -> None:
        request = self._book.requests.get(key)
        if request is not None and request.common is Common.LANDING:
            self.pool.landed(key)
            self._book.complete(request)

    def landing_failed(self, key: Key) -> None:
        request = self._book.requests.get(key)
        if request is not None and request.common is Common.LANDING:
            self._book.remove(request)
        self._book.read_is_over(key)

    def quiescent(self, key: Key) -> None:
        """No read into the blocks of a dropped or yielded landing is outstanding. Ignored for anything else."""
        self._book.read_is_over(key)

    def add(self, request: DecodeRequest) -> bool:
        """Queue a request to be prefilled here. False: it can never fit. A key known here, or over, is ignored."""
        if request.key in self._book.requests or self._book.is_past(request.key):
            return True
        if not self.fits_ever(request):
            return False
        queued = self._book.arrive(request, Common.QUEUED)
        self._book.local.add(request.key, Work(queued, None, request.tokens, queued.digests))
        return True

    # tokens

    def start(self, key: Key, sample: int, position: int, token: int) -> None:
        """The first token of a sample is accepted. Ignored unless it is exactly the next one."""
        waiting = self._book.sample(key, sample)
        if waiting is not None and waiting.state in (State.PENDING, State.EVICTED):
            self._accept(waiting, position, token)

    def token_sampled(self, key: Key, sample: int, position: int, token: int) -> FinishReason | None:
        """A token drawn by the step that has just completed. Returns why the sample is over, if it is.

        Ignored unless it is exactly the next one: the sample may have been dropped meanwhile.
        """
        drawn = self._book.sample(key, sample)
        if drawn is None or drawn.state not in (State.RUNNING, State.PENDING):
            return None
        if drawn.state is State.PENDING and drawn.request.common is not Common.COMPLETE:
            return None
        return self._accept(drawn, position, token)

    def _accept(self, sample: Sample, position: int, token: int) -> FinishReason | None:
        if position != len(sample.tokens):
            return None
        reason = sample.sampling.finish_reason(token, sample.num_generated + 1)
        if reason is None:
            self._book.accept(sample, token)
            return None
        sample.tokens.append(token)
        self.forecast.observe(sample.num_generated)
        self._book.remember_end(sample)
        self._book.end_sample(sample, len(sample.tokens))
        return reason

    # leaving

    def drop(self, key: Key) -> None:
        """The attempt has no business here any more, in whatever state."""
        request = self._book.requests.get(key)
        if request is not None:
            self._book.remove(request)

    def drop_sample(self, key: Key, sample: int, num_generated: int) -> None:
        """One sample is over after `num_generated` tokens of output; what lies beyond is never cached."""
        dropped = self._book.sample(key, sample)
        if dropped is not None:
            self._book.end_sample(dropped, dropped.num_prompt + num_generated)
        else:
            self._book.shorten_ended(key, sample, num_generated)

    def take_gone(self) -> list[Key]:
        """Keys of which nothing is held, landing or draining any more, each told once."""
        return self._book.take_gone()

    # stepping

    def plan(self, now_s: float) -> DecodePlan:
        """The next step: samples join, running ones get their blocks, oldest first; chunks fill what is left."""
        book = self._book
        assert not book.in_step, "the step before has not completed"
        self._room.begin_step()
        self._join(now_s)
        decodes = []
        for sample in list(book.running):
            if sample.state is not State.RUNNING:
                continue
            if len(sample.tokens) <= len(sample.table) * self.pool.block_size or self._room.grow(sample, now_s):
                decodes.append(sample)
        decodes = [sample for sample in decodes if sample.state is State.RUNNING]
        chunks = self._chunks.plan(self._config.max_batched_tokens - len(decodes))
        self.num_preemptions += len(self._room.preempted)
        return DecodePlan(
            copies=tuple(book.begin_step()),
            decodes=tuple(decodes),
            chunks=tuple(chunks),
            yielded=tuple(self._room.yielded),
            preempted=tuple(self._room.preempted),
        )

    def completed(self, plan: DecodePlan) -> None:
        """Everything the step wrote is in place; call it before telling the tokens it drew."""
        for sample in plan.decodes:
            if sample.state is State.RUNNING:
                sample.computed = len(sample.tokens)
        for chunk in plan.chunks:
            self._chunks.completed(chunk)
        self._book.step_completed()

    def _join(self, now_s: float) -> None:
        book = self._book
        for sample in list(book.ready):
            if sample.state is not State.READY:
                continue  # yielded meanwhile
            if len(book.running) + len(book.works) >= self._config.max_running:
                return
            while not book.join(sample):
                if book.running or book.works or not self._room.make(sample, now_s):
                    return  # in order: those behind it wait too

    # questions

    def sample(self, key: Key, index: int) -> Sample | None:
        """A sample that is not over: its history and parameters, to read only."""
        return self._book.sample(key, index)

    def cached_tokens(self, key: Key) -> int:
        """Of the request's tokens, how many came from the cache here; 0 until admitted."""
        request = self._book.requests.get(key)
        return 0 if request is None else request.num_cached

    @property
    def num_cached_tokens(self) -> int:
        """Total of tokens that neither moved nor were computed because their blocks were cached here."""
        return self._num_cached_tokens + self._chunks.num_cached_tokens

    @property
    def num_recomputed_tokens(self) -> int:
        """Total of tokens computed again after a preemption."""
        return self._chunks.num_recomputed_tokens

    def is_gone(self, key: Key) -> bool:
        return self._book.is_gone(key)

    def held(self) -> list[Key]:
        """Every request known here."""
        return list(self._book.requests)

    @property
    def num_running(self) -> int:
        """Samples that decode or are computed again."""
        return len(self._book.running) + len(self._book.works)

    @property
    def num_waiting(self) -> int:
        return len(self._book.ready) + len(self._book.preempted) + len(self._book.local)

    def has_work(self) -> bool:
        """Whether a plan would have anything to look at."""
        return self.num_running + self.num_waiting > 0

    def check(self) -> None:
        """Prove that every block belongs to somebody known here; for tests and idle workers."""
        self._book.check()
