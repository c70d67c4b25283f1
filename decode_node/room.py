"""Who fits and who yields: the memory policy of a decode worker.

Owns no block and no queue; it reads the book and calls its transitions. Order of yielding: idle cache (inside the
pool), unfinished landings, youngest first, then preemption, lowest priority and youngest first.
Invariant: the oldest running request never yields, so something always finishes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from decode_node.book import Book
from decode_node.plan import COMMON, DecodeConfig, DecodeRequest
from decode_node.samples import Common, Request, Sample, State, Work
from pdserve.forecast import Forecast
from pdserve.messages import Key
from pdserve.request import blocks_at_end

Holding = Sample | Work | Request  # what can be preempted; a request stands for its common blocks


class Room:
    def __init__(self, book: Book, config: DecodeConfig, forecast: Forecast) -> None:
        self._book = book
        self._pool = book.pool
        self._config = config
        self._forecast = forecast
        self._promised: dict[Key, tuple[int, float]] = {}  # draining blocks of landings that yielded, until when
        self._num_awaiting = 0  # samples that wait for promised blocks in this step
        self.yielded: list[Key] = []  # in this step
        self.preempted: list[tuple[Key, int]] = []

    # fitting

    def footprint(self, spec: DecodeRequest) -> int:
        """Blocks the request needs alone at its end."""
        return blocks_at_end(spec.sampling, spec.num_prompt, len(spec.tokens), self._pool.block_size)

    def landing_blocks(self, spec: DecodeRequest) -> int:
        """For the tokens, and one for growth if the request will ever grow that far."""
        return min(self._pool.blocks_for(len(spec.tokens)) + 1, self.footprint(spec))

    def fits(self, newcomer: Request | Work) -> bool:
        """Whether the future peak of everything admitted and the newcomer stays within the pool.

        After a preemption the forecast was wrong: each one doubles the length that is reckoned with.
        """
        newcomer_loads = list(self._loads(newcomer, is_newcomer=True))
        margin = 0
        if isinstance(newcomer, Work):
            samples = newcomer.request.samples if newcomer.sample is None else [newcomer.sample]
            margin = self._pool.block_size * (2 ** max(sample.num_preempted for sample in samples) - 1)
        admitted = [load for request in self._book.requests.values() for load in self._loads(request)]
        if not admitted:
            return True
        loads = [(blocks, min(most, expected + margin)) for blocks, expected, most in admitted + newcomer_loads]
        return future_peak(loads, self._pool.block_size) <= self._pool.usable

    def _loads(self, item: Request | Work, is_newcomer: bool = False) -> Iterator[tuple[int, int, int]]:
        """(blocks, tokens expected to come, most tokens to come) of each sample that counts as admitted."""
        request = item if isinstance(item, Request) else item.request
        only = item.sample if isinstance(item, Work) else None
        max_tokens, num_own_start = request.spec.sampling.max_tokens, 0
        for sample in request.samples:
            if is_newcomer:
                counts = sample is only if only is not None else sample.uses_common
            else:
                counts = sample.state in (State.RUNNING, State.RESUMING) or (sample.uses_common and request.has_blocks)
            if counts:
                blocks = self._pool.blocks_for(len(sample.tokens)) - num_own_start
                num_own_start = len(request.digests)  # the next samples share the full common blocks
                to_come = self._forecast.most_to_come(sample.num_generated, max_tokens)
                yield blocks, to_come, max_tokens - sample.num_generated

    # yielding

    def begin_step(self) -> None:
        self.yielded, self.preempted, self._num_awaiting = [], [], 0

    def grow(self, sample: Sample, now_s: float) -> bool:
        """One more block for a running sample, whoever must yield for it.

        False if it must wait for blocks that are draining, or was itself the one to yield.
        """
        while not self._pool.grow(sample.holder):
            if not self._make(sample, now_s) or sample.state is not State.RUNNING:
                return False
        return True

    def make(self, sample: Sample, now_s: float) -> bool:
        """Make somebody yield for a ready sample. False if nobody can, or blocks are on their way."""
        return self._make(sample, now_s) and sample.state is State.READY

    def _make(self, needy: Sample, now_s: float) -> bool:
        if self._num_promised(now_s) > self._num_awaiting:
            self._num_awaiting += 1
            return False
        if self._yield_landing(now_s):
            return True
        victim = self._victim(needy)
        if victim is None:
            return False
        self._preempt(victim)
        return True

    def _num_promised(self, now_s: float) -> int:
        for key in [key for key, (_, until_s) in self._promised.items() if until_s <= now_s]:
            del self._promised[key]
        return sum(blocks for key, (blocks, _) in self._promised.items() if self._pool.is_draining(key))

    def _yield_landing(self, now_s: float) -> bool:
        landings = [request for request in self._book.requests.values() if request.common is Common.LANDING]
        if not landings:
            return False
        youngest = max(landings, key=lambda request: request.arrival)
        before = self._pool.counts().draining
        self._book.remove(youngest)
        self.yielded.append(youngest.key)
        self._promised[youngest.key] = (self._pool.counts().draining - before, now_s + self._config.drain_grace_s)
        return True

    def _victim(self, needy: Sample) -> Holding | None:
        book = self._book
        computing: list[Sample | Work] = [*book.running, *book.works.values()]
        protected = min((item.request.arrival for item in computing), default=needy.request.arrival)
        best: tuple[int, int, int] | None = None
        victim: Holding | None = None
        common = [request for request in book.requests.values() if request.common is Common.COMPLETE]
        items: list[Holding] = [*computing, *common]
        for item in items:
            request = item if isinstance(item, Request) else item.request
            # the youngest of the lowest priority; of one request first what does not run yet
            index = len(request.samples) if isinstance(item, Request) else item.index
            rank = (request.spec.priority, request.arrival, index)
            if request.arrival != protected and (best is None or rank > best):
                best, victim = rank, item
        return victim

    def _preempt(self, victim: Holding) -> None:
        index = COMMON if isinstance(victim, Request) else victim.index
        self.preempted.append((victim.key if not isinstance(victim, Work) else victim.request.key, index))
        if isinstance(victim, Request):
            self._book.preempt_common(victim)
        elif isinstance(victim, Work):
            self._book.preempt_work(victim)
        else:
            self._book.preempt_sample(victim)


def future_peak(loads: Iterable[tuple[int, int]], block_size: int) -> int:
    """The most blocks ever held if each of `loads`, (blocks now, tokens to come), grows to its end and leaves.

    When the n-th longest ends, the n longest are there and each has grown as much as it (after Gong et al., 2025).
    """
    held = peak = 0
    for num, (blocks, to_come) in enumerate(sorted(loads, key=lambda load: -load[1]), start=1):
        held += blocks
        peak = max(peak, held - (-num * to_come // block_size))
    return peak
