"""The protocol as a whole, against a model: whatever happens in whatever order, no recycled data is ever accepted."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transfer_kit import KEY, published, run, target

from kv_transfer.header import GenerationHeader, HeaderView
from kv_transfer.landing import Landing, Phase
from kv_transfer.links import ReadResult
from pdserve.blocks import BlockPool
from pdserve.leases import Leases

NUM_BLOCKS = 4  # three to give away: whatever is freed is soon somebody else's
TTL_S = 10.0
HALVES = (0, 1)  # a block is written, and read, in two strokes, so that either can be torn by the other


@dataclass
class Written:
    """A request on the owner: its blocks, the value each must hold, and strokes still to be made."""

    name: int
    blocks: list
    values: list
    todo: list


@dataclass
class Announced:
    name: int
    epoch: str
    blocks: tuple
    generations: tuple
    values: tuple


@dataclass
class Copy:
    announced: Announced
    data: dict = field(default_factory=dict)

    @property
    def todo(self):
        return [(b, h) for b in self.announced.blocks for h in HALVES if (b, h) not in self.data]


class Protocol(RuleBasedStateMachine):
    """One owner with a real header, block pool and leases; readers that copy one stroke at a time."""

    @initialize()
    def begin(self):
        self.now_s, self.names, self.lives = 0.0, 0, 1
        self.header = GenerationHeader(num_blocks=NUM_BLOCKS, epoch="life 1")
        self.view = HeaderView(self.header.fd, total_blocks=NUM_BLOCKS)
        self.memory = {(block, half): 0 for block in range(NUM_BLOCKS) for half in HALVES}
        self.writing, self.announced, self.copies = [], [], []
        self.new_pool()

    def new_pool(self):
        self.pool = BlockPool(NUM_BLOCKS, 4, on_recycle=self.header.bump)
        self.leases = Leases(self.pool, TTL_S)

    def teardown(self):
        if hasattr(self, "header"):
            self.header.close()

    @rule(num_blocks=st.integers(1, 3), strokes=st.sampled_from([0, 1, 6, 6]))
    def admit(self, num_blocks, strokes):
        self.names += 1
        if self.pool.admit(self.names, (), (), num_blocks) is not None:
            blocks = list(self.pool.table(self.names))
            values = [100 * self.names + index for index in range(num_blocks)]
            todo = [(block, half, value) for block, value in zip(blocks, values, strict=True) for half in HALVES]
            self.writing.append(Written(self.names, blocks, values, todo))
            self.write_some(self.writing[-1], strokes)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), strokes=st.integers(1, 4))
    def write(self, data, strokes):
        self.write_some(data.draw(st.sampled_from(self.writing)), strokes)

    def write_some(self, it, strokes):
        for block, half, value in it.todo[:strokes]:
            self.memory[block, half] = value
        del it.todo[:strokes]
        if not it.todo:
            self.writing.remove(it)
            generations = self.header.generations(it.blocks)
            self.announced.append(
                Announced(it.name, self.header.epoch, tuple(it.blocks), generations, tuple(it.values))
            )
            self.leases.grant(it.name, self.now_s)

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def abort_a_prefill(self, data):
        it = data.draw(st.sampled_from(self.writing))
        self.writing.remove(it)
        self.pool.release(it.name)

    @precondition(lambda self: self.announced)
    @rule(data=st.data())
    def release(self, data):
        self.leases.release(data.draw(st.sampled_from(self.announced[-3:])).name)

    @precondition(lambda self: self.announced)
    @rule(data=st.data())
    def renew(self, data):
        self.leases.renew(data.draw(st.sampled_from(self.announced)).name, self.now_s)

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def time_passes(self, seconds):
        self.now_s += seconds
        self.leases.expire(self.now_s)

    @precondition(lambda self: self.lives < 3)
    @rule()
    def the_owner_starts_a_new_life(self):
        self.lives += 1
        self.writing = []
        self.header.set_epoch(f"life {self.lives}")
        self.new_pool()

    @precondition(lambda self: self.announced)
    @rule(data=st.data(), strokes=st.sampled_from([0, 1, 3, 6]))
    def start_reading(self, data, strokes):
        self.copies.append(Copy(data.draw(st.sampled_from(self.announced[-3:]))))
        self.copy_some(self.copies[-1], strokes)

    @precondition(lambda self: self.copies)
    @rule(data=st.data(), strokes=st.integers(1, 4))
    def copy(self, data, strokes):
        self.copy_some(data.draw(st.sampled_from(self.copies)), strokes)

    def copy_some(self, copy, strokes):
        for stroke in copy.todo[:strokes]:
            copy.data[stroke] = self.memory[stroke]
        if not copy.todo:
            self.copies.remove(copy)
            self.judge(copy)

    def judge(self, copy):
        it = copy.announced
        reason = self.view.why_invalid(it.epoch, it.blocks, it.generations)
        if reason is None:
            expected = {(b, h): value for b, value in zip(it.blocks, it.values, strict=True) for h in HALVES}
            assert copy.data == expected, "recycled data was accepted"
        if it.epoch == self.header.epoch and it.name in self.leases:
            assert reason is None, "leased blocks were not kept"

    @invariant()
    def blocks_have_one_state(self):
        if hasattr(self, "pool"):
            self.pool.check()


class OneLanding(RuleBasedStateMachine):
    """A landing of five blocks, one of them held already, under messages and results in any order."""

    @initialize()
    def begin(self):
        self.landing = Landing(key=KEY, owner="e", target=target(18, held=1))
        self.reads, self.validated, self.has_failed = {}, set(), False

    @rule(first=st.integers(0, 4), num_blocks=st.integers(1, 5), is_last=st.booleans())
    def publish(self, first, num_blocks, is_last):
        num_tokens = min(18, 4 * (first + num_blocks)) - 4 * first
        blocks = range(first + 1, first + 1 + -(-num_tokens // 4))
        before = self.landing.phase
        read = self.landing.publish(published(run(4 * first, num_tokens, blocks), is_last=is_last))
        self.has_failed |= before is Phase.READING and self.landing.phase in (Phase.DRAINING, Phase.OVER)
        if read is not None:
            assert not set(read.destinations) & {d for each in self.reads.values() for d in each}
            assert not set(read.destinations) & self.validated
            self.reads[read.read_id] = read.destinations

    @precondition(lambda self: self.reads)
    @rule(data=st.data(), reason=st.sampled_from(["", "", "", "stale_generation"]))
    def finish(self, data, reason):
        read_id = data.draw(st.sampled_from(sorted(self.reads)))
        destinations = self.reads.pop(read_id)
        self.landing.finish(ReadResult(read_id=read_id, reason=reason, num_bytes=0, seconds=0.0))
        if reason:
            self.has_failed = True
        else:
            self.validated |= set(destinations)

    @rule()
    def abort(self):
        self.landing.fail("aborted")
        self.has_failed = True

    @precondition(lambda self: self.reads and self.landing.phase is Phase.DRAINING)
    @rule(data=st.data())
    def quiescent(self, data):
        read_id = data.draw(st.sampled_from(sorted(self.reads)))
        del self.reads[read_id]
        self.landing.quiescent(read_id)

    @invariant()
    def landed_means_everything_missing_is_validated(self):
        if hasattr(self, "landing") and self.landing.phase is Phase.LANDED:
            assert self.validated == {101, 102, 103, 104}
            assert not self.reads and not self.has_failed

    @invariant()
    def over_means_nothing_is_outstanding(self):
        if hasattr(self, "landing"):
            assert sorted(self.landing.outstanding) == sorted(self.reads)
            assert (self.landing.phase is Phase.OVER) == (self.has_failed and not self.reads)


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestOneLanding = OneLanding.TestCase
TestOneLanding.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
