"""The decode scheduler, driven by a worker without a device whose cache records what each row was computed from."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_node.plan import COMMON, DecodeConfig, DecodeRequest
from decode_node.scheduler import DecodeScheduler
from pdserve.blocks import BlockPool
from pdserve.forecast import Forecast
from pdserve.messages import Key
from pdserve.request import Sampling


def key(name):
    return Key(request=name, attempt=1)


def request(name, prompt, max_tokens=8, n=1, **fields):
    tokens = [ord(name[0]) * 1000 + at for at in range(prompt)] if isinstance(prompt, int) else list(prompt)
    stop = fields.pop("stop_token_ids", ())
    sampling = Sampling(max_tokens=max_tokens, n=n, temperature=0.0, stop_token_ids=stop)
    fields.setdefault("num_prompt", len(tokens))
    return DecodeRequest(key=key(name), tokens=tokens, sampling=sampling, **fields)


def token_at(name, sample, position):
    """What the model of these tests says; it depends on nothing else."""
    return hash_of((name, sample, position)) % 50000


def hash_of(value):
    return random.Random(repr(value)).getrandbits(32)


class Optimist(Forecast):
    """Expects every output to end at once, so memory is always overcommitted."""

    def most_to_come(self, num_generated, max_tokens):
        return 0


class Worker:
    """Runs plans: checks before every step that the cache holds what the tokens say, and writes what it computes."""

    def __init__(self, num_blocks=65, block_size=16, forecast=None, **config):
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = DecodeScheduler(self.pool, DecodeConfig(**config), forecast)
        self.rows = {}
        self.asking = {}  # key -> turns its read will take
        self.gone, self.landed = [], []
        self.reads = {}  # key -> (landing plan, tokens, turns left)
        self.output, self.reasons, self.yielded, self.preempted = {}, {}, [], []
        self.specs = {}
        self.now_s = 0.0

    # what arrives

    def land(self, spec, turns=1, starts=True):
        self.specs[spec.key] = spec
        plan = self.scheduler.reserve_landing(spec)
        if plan is not None:
            self.read(plan, turns)
        else:
            self.asking[spec.key] = turns
        if starts:
            self.start(spec)
        return plan

    def ask_again(self):
        self.gone = self.take_gone()
        for name, turns in list(self.asking.items()):
            plan = self.scheduler.reserve_landing(self.specs[name])
            if plan is not None:
                del self.asking[name]
                self.landed.append(name)
                self.read(plan, turns)

    def start(self, spec):
        for sample in range(spec.sampling.n):
            position = len(spec.tokens)
            token = token_at(spec.key.request, sample, position)
            self.output.setdefault((spec.key.request, sample), [token])
            self.scheduler.start(spec.key, sample, position, token)

    def local(self, spec):
        self.specs[spec.key] = spec
        return self.scheduler.add(spec)

    def read(self, plan, turns=1):
        self.reads[plan.key] = [plan, turns]
        if plan.first_position == plan.num_tokens:
            del self.reads[plan.key]
            self.scheduler.landing_done(plan.key)

    def turn_reads(self):
        for name, entry in list(self.reads.items()):
            plan, entry[1] = entry[0], entry[1] - 1
            tokens = self.specs[name].tokens
            self.write(plan.blocks, tokens, plan.first_position, plan.num_tokens)
            if entry[1] <= 0:
                del self.reads[name]
                self.scheduler.landing_done(name)
                self.scheduler.quiescent(name)

    # the cache

    def write(self, blocks, tokens, first, last):
        for at in range(first, last):
            self.rows[divmod_row(blocks, at, self.pool.block_size)] = hash(tuple(tokens[: at + 1]))

    def verify(self, blocks, tokens, last):
        for at in range(last):
            found = self.rows.get(divmod_row(blocks, at, self.pool.block_size))
            assert found == hash(tuple(tokens[: at + 1])), f"row {at} of {last} holds something else"

    # a step

    def step(self, during=lambda: None, now_s=None):
        self.now_s = self.now_s + 0.01 if now_s is None else now_s
        self.ask_again()
        self.turn_reads()
        before = [work.request.arrival for work in self.scheduler._book.works.values()]
        plan = self.scheduler.plan(self.now_s)
        self.yielded += plan.yielded
        self.preempted += plan.preempted
        oldest = min([sample.request.arrival for sample in self.scheduler._book.running] + before, default=-1)
        ran = [name for name, sample in plan.preempted if sample != COMMON]
        assert all(self.arrival(name) > oldest for name in ran), "the oldest yielded"
        rows = {
            (target, at): self.rows.get((source, at))
            for source, target in plan.copies
            for at in range(self.pool.block_size)
        }
        self.rows.update(rows)
        drawn = []
        for sample in plan.decodes:
            tokens, last = list(sample.tokens), len(sample.tokens)
            self.verify(sample.table, tokens, last - 1)
            drawn.append((sample.key, sample.index, last, list(sample.table), tokens, last - 1))
        for chunk in plan.chunks:
            source = self.specs[chunk.key].tokens
            if chunk.sample != COMMON:
                source = self.scheduler.sample(chunk.key, chunk.sample).tokens
            tokens = list(source[: chunk.start + chunk.num_tokens])
            assert tokens[chunk.start :] == list(chunk.tokens)
            self.verify(chunk.blocks, tokens, chunk.start)
            for sample in chunk.draw or (None,):
                drawn.append((chunk.key, sample, len(tokens), chunk.blocks, tokens, chunk.start))
        during()
        for _, _, last, blocks, tokens, first in drawn:
            self.write(blocks, tokens, first, last)
        self.scheduler.completed(plan)
        self.scheduler.check()
        for name, sample, position, _, _, _ in drawn:
            if sample is not None:
                self.tell(name, sample, position)
        self.scheduler.check()
        return plan

    def take_gone(self):
        gone, self.gone = self.gone + self.scheduler.take_gone(), []
        for name in gone:
            self.asking.pop(name, None)
        return gone

    def tell(self, name, sample, position):
        token = token_at(name.request, sample, position)
        if self.scheduler.sample(name, sample) is None:
            return
        reason = self.scheduler.token_sampled(name, sample, position, token)
        self.output.setdefault((name.request, sample), []).append(token)
        if reason is not None:
            self.reasons[(name.request, sample)] = reason

    def arrival(self, name):
        known = self.scheduler._book.requests.get(name)
        return known.arrival if known else None

    def run(self, most=2000):
        steps = 0
        while self.scheduler.has_work() or self.reads or self.asking:
            self.step()
            steps += 1
            assert steps < most, "no end in sight"
        return steps

    def expect(self, *specs):
        for spec in specs:
            for sample in range(spec.sampling.n):
                name, start = spec.key.request, len(spec.tokens)
                num = spec.sampling.max_tokens - (start - spec.num_prompt)
                assert self.output[(name, sample)] == [token_at(name, sample, start + at) for at in range(num)]

    def nothing_leaked(self):
        counts = self.pool.counts()
        assert (counts.held, counts.landing, counts.draining) == (0, 0, 0)
        assert self.scheduler.held() == [] and not self.scheduler.has_work()
        self.scheduler.check()


def divmod_row(blocks, at, size):
    return (blocks[at // size], at % size)


# landing and joining


def test_a_landed_request_decodes_from_its_accepted_first_token():
    worker = Worker()
    spec = request("r", 40, max_tokens=5)
    plan = worker.land(spec)
    assert (plan.first_position, plan.num_tokens, len(plan.blocks)) == (0, 40, 3)
    worker.run()
    worker.expect(spec)
    assert worker.reasons == {("r", 0): "length"} and worker.take_gone() == [key("r")]
    worker.nothing_leaked()


@pytest.mark.parametrize("order", ["start first", "landing first"])
def test_a_sample_joins_when_both_the_landing_and_the_start_have_come(order):
    worker = Worker()
    spec = request("r", 20)
    worker.land(spec, turns=1 if order == "landing first" else 4, starts=order == "start first")
    for _ in range(3):
        assert worker.step().decodes == ()
    worker.start(spec)
    worker.step()
    assert len(worker.step().decodes) == 1


def test_a_landing_takes_one_block_more_for_growth_if_it_will_grow():
    worker = Worker()
    assert len(worker.land(request("a", 32, max_tokens=9)).blocks) == 3
    assert len(worker.land(request("b", 33, max_tokens=9)).blocks) == 3  # the last block has room for all of it


def test_leading_blocks_that_are_here_are_pinned_and_do_not_move():
    worker = Worker()
    worker.land(request("a", 40))
    worker.run()
    first = worker.specs[key("a")].tokens
    plan = worker.land(request("b", first[:32] + [1] * 8))
    assert plan.first_position == 32
    worker.run()
    worker.expect(worker.specs[key("b")])


@pytest.mark.parametrize("length", [64, 65])
def test_a_prompt_that_is_here_completely_has_nothing_to_read_and_still_runs(length):
    worker = Worker()
    spec = request("a", length)
    for name in "abc":
        again = request(name, spec.tokens)
        plan = worker.land(again)
        assert plan.first_position == (0 if name == "a" else 64)
        worker.run()
        worker.expect(again)
    worker.nothing_leaked()


@pytest.mark.parametrize("length", [47, 48, 49])
@pytest.mark.parametrize("warm", range(4))
def test_exactly_the_missing_positions_are_read(length, warm):
    worker = Worker()
    tokens = list(range(length))
    if warm:
        worker.land(request("w", tokens[: 16 * warm]))
        worker.run()
    spec = request("r", tokens)
    assert worker.land(spec).first_position == min(16 * warm, length // 16 * 16)
    worker.run()
    worker.expect(spec)


def test_landing_blocks_are_not_in_the_cache_before_they_are_validated():
    worker = Worker()
    worker.land(request("a", 64), turns=3)
    assert worker.land(request("b", worker.specs[key("a")].tokens)).first_position == 0


def test_a_duplicate_or_late_start_changes_nothing():
    worker = Worker()
    spec = request("r", 20, max_tokens=4)
    worker.land(spec)
    worker.start(spec)
    worker.step()
    worker.scheduler.start(key("r"), 0, 20, 7)
    worker.scheduler.start(key("r"), 0, 99, 7)
    worker.scheduler.start(key("r"), 5, 20, 7)
    worker.scheduler.start(key("unknown"), 0, 20, 7)
    worker.run()
    worker.expect(spec)


def test_a_first_token_that_ends_the_sample_runs_no_decode_step():
    worker = Worker()
    spec = request("r", 20, stop_token_ids=(token_at("r", 0, 20),))
    worker.land(spec, turns=3)
    assert not worker.scheduler.has_work()
    assert worker.pool.counts().draining > 0 and worker.take_gone() == []
    for _ in range(3):
        assert worker.step().is_empty
    assert worker.take_gone() == [key("r")]
    worker.nothing_leaked()


def test_a_request_that_can_never_fit_is_refused():
    worker = Worker(num_blocks=65)
    huge = request("h", 1000, max_tokens=100)
    assert not worker.scheduler.fits_ever(huge) and worker.scheduler.reserve_landing(huge) is None
    assert not worker.scheduler.add(huge) and not worker.scheduler.add(request("e", 0))
    exact = request("x", 1000, max_tokens=25)  # 1025 tokens, of which the last is never computed
    assert worker.local(exact)
    worker.run()
    worker.expect(exact)


def test_landings_take_at_most_their_share_of_the_pool_but_one_may_exceed_it():
    worker = Worker(num_blocks=65, landing_share=0.25)
    assert worker.land(request("a", 320), turns=3) is not None
    assert worker.land(request("b", 16), turns=3) is None
    worker.run()
    worker.expect(*worker.specs.values())


def test_a_landing_without_room_asks_again_until_there_is():
    worker = Worker(num_blocks=34)
    specs = [request("a", 256, max_tokens=64), request("b", 256, max_tokens=64)]
    assert worker.land(specs[0]) is not None
    assert worker.land(specs[1]) is None
    assert worker.scheduler.reserve_landing(specs[1]) is None
    worker.run()
    worker.expect(*specs)
    worker.nothing_leaked()


def test_landings_are_served_in_the_order_they_asked():
    worker = Worker(num_blocks=34)
    worker.land(request("a", 256, max_tokens=64))
    assert worker.land(request("b", 256, max_tokens=64)) is None
    assert worker.land(request("c", 16, max_tokens=2)) is None  # it would fit, but then b might wait for ever
    worker.run()
    assert worker.landed == [key("b"), key("c")]


def test_a_late_command_does_not_bring_back_what_is_over():
    worker = Worker()
    spec = request("r", 40, max_tokens=4)
    worker.land(spec)
    worker.run()
    assert worker.scheduler.reserve_landing(spec) is None
    assert worker.scheduler.add(spec)
    worker.scheduler.start(spec.key, 0, 40, 1)
    worker.nothing_leaked()


def test_a_landing_in_line_can_be_dropped():
    worker = Worker(num_blocks=34)
    worker.land(request("a", 256, max_tokens=64))
    worker.land(request("b", 256, max_tokens=64))
    worker.scheduler.drop(key("b"))
    assert worker.take_gone() == [key("b")]
    worker.run()
    worker.nothing_leaked()


# aborts


def test_a_landing_dropped_under_an_outstanding_read_drains_until_it_is_quiescent():
    worker = Worker(num_blocks=34)
    worker.land(request("a", 480, max_tokens=2), turns=5)
    worker.scheduler.drop(key("a"))
    assert worker.pool.counts().draining == 31 and worker.take_gone() == []
    second = request("b", 480, max_tokens=2)
    assert worker.land(second) is None
    worker.run()
    worker.expect(second)
    assert worker.take_gone() == [key("a"), key("b")]
    worker.nothing_leaked()


def test_a_failed_landing_returns_every_block_at_once():
    worker = Worker()
    worker.land(request("r", 40), turns=99)
    worker.reads.clear()
    worker.scheduler.landing_failed(key("r"))
    worker.scheduler.landing_failed(key("r"))
    assert worker.pool.counts().free == 64 and worker.take_gone() == [key("r")]
    worker.nothing_leaked()


def states():
    """Workers with a request "r" in each state a request can be in."""
    spec = request("r", 40, max_tokens=20, n=2)
    other = request("o", 16 * 50, max_tokens=16 * 14)
    for state in ("unknown", "in line", "landing", "landed", "running", "queued", "chunk", "preempted", "finished"):
        worker = Worker(chunk_tokens=16, max_batched_tokens=16, forecast=Optimist())
        if state == "in line":
            worker.land(other, turns=99)
            worker.land(spec)
        elif state == "landing":
            worker.land(spec, turns=3)
        elif state == "landed":
            worker.land(spec, starts=False)
            worker.step()
        elif state == "running":
            worker.land(spec)
            worker.step()
        elif state == "queued":
            worker.local(spec)
        elif state == "chunk":
            worker.local(spec)
            worker.step()
        elif state == "preempted":
            worker = Worker(num_blocks=20, block_size=4, forecast=Optimist())
            worker.local(request("o", 20, max_tokens=56))
            assert worker.local(request("r", 24, max_tokens=20, n=2))
            while not worker.preempted:
                worker.step()
        elif state == "finished":
            worker.local(spec)
            worker.run()
        yield pytest.param(worker, id=state)


@pytest.mark.parametrize("worker", list(states()))
def test_a_drop_is_harmless_in_every_state_and_returns_every_block(worker):
    for _ in range(2):
        worker.scheduler.drop(key("r"))
        worker.scheduler.check()
    worker.scheduler.drop(key("o"))
    for _ in range(100):
        worker.step()
    worker.nothing_leaked()


@pytest.mark.parametrize("worker", list(states()))
def test_dropping_the_samples_one_by_one_is_harmless_in_every_state_too(worker):
    for sample in (0, 0, 1, 1, 7, -1):
        worker.scheduler.drop_sample(key("r"), sample, 1)
        worker.scheduler.check()
    worker.scheduler.drop(key("o"))
    for _ in range(100):
        worker.step()
    worker.nothing_leaked()


def test_blocks_that_a_step_in_flight_may_write_drain_until_it_completes():
    worker = Worker()
    worker.land(request("r", 40))

    def drop():
        worker.scheduler.drop(key("r"))
        assert worker.pool.counts().draining > 0 and worker.take_gone() == []

    worker.step(during=drop)
    assert worker.take_gone() == [key("r")]
    worker.nothing_leaked()


def test_the_source_of_a_copy_is_kept_until_the_copy_is_done():
    worker = Worker(num_blocks=9)
    spec = request("r", 24, max_tokens=8, n=2)
    worker.land(spec, starts=False)
    worker.step()
    worker.scheduler.start(key("r"), 0, 24, 7)

    def drop():
        (source,) = worker.pool.table(("copy", (key("r"), 0)))
        worker.scheduler.drop(key("r"))
        worker.land(request("q", 64, max_tokens=9), turns=9)
        assert source not in worker.pool.table(key("q")) and worker.take_gone() == []

    worker.step(during=drop)
    assert worker.take_gone() == [key("r")]


def test_a_block_is_not_cached_before_the_step_that_fills_it():
    worker = Worker()
    spec = request("r", 47, max_tokens=8)
    worker.land(spec)

    def drop():
        worker.scheduler.drop_sample(key("r"), 0, 8)

    worker.step(during=drop)
    assert cached_prefix(worker, finished_output(worker, spec)) == 32


# samples


@pytest.mark.parametrize("length", [47, 48, 49])
@pytest.mark.parametrize("road", ["landing", "local"])
def test_samples_share_the_full_blocks_and_copy_the_partial_one(length, road):
    worker = Worker()
    spec = request("r", length, max_tokens=40, n=3)
    worker.land(spec) if road == "landing" else worker.local(spec)
    copies = []
    while worker.scheduler.has_work() or worker.reads:
        copies += worker.step().copies
        assert worker.pool.counts().held <= 3 + 3 * 4
    assert len(copies) == (0 if length == 48 else 2)
    worker.expect(spec)
    worker.nothing_leaked()


def test_one_sample_ends_and_the_others_go_on():
    worker = Worker()
    spec = request("r", 40, max_tokens=10, n=3, stop_token_ids=(token_at("r", 1, 43),))
    worker.land(spec)
    worker.run()
    assert [len(worker.output[("r", sample)]) for sample in range(3)] == [10, 4, 10]
    assert worker.reasons[("r", 1)] == "stop" and worker.reasons[("r", 0)] == "length"
    worker.nothing_leaked()


def test_a_sample_that_starts_late_joins_late():
    worker = Worker()
    spec = request("r", 40, max_tokens=6, n=2)
    worker.land(spec, starts=False)
    worker.scheduler.start(key("r"), 1, 40, token_at("r", 1, 40))
    worker.output[("r", 1)] = [token_at("r", 1, 40)]
    for _ in range(8):
        worker.step()
    assert worker.reasons == {("r", 1): "length"} and worker.pool.counts().held == 4
    worker.start(spec)
    worker.run()
    worker.expect(spec)
    worker.nothing_leaked()


def test_a_sample_that_ended_at_its_first_token_does_not_hold_the_prompt():
    worker = Worker()
    spec = request("r", 40, max_tokens=6, n=2)
    worker.land(spec, starts=False)
    worker.scheduler.start(key("r"), 0, 40, token_at("r", 0, 40))
    worker.step()
    worker.scheduler.drop_sample(key("r"), 1, 1)
    worker.step()
    assert worker.pool.counts().held == 3
    worker.scheduler.drop(key("r"))
    worker.nothing_leaked()


# what is cached


def cached_prefix(worker, tokens):
    """Leading tokens of `tokens` that a new request would find."""
    plan = worker.land(request("q", tokens, max_tokens=1), turns=99)
    return plan.first_position


def finished_output(worker, spec):
    return spec.tokens + worker.output[(spec.key.request, 0)]


def test_the_output_of_a_finished_request_serves_the_next_turn():
    worker = Worker()
    spec = request("r", 40, max_tokens=30)
    worker.land(spec)
    worker.run()
    assert cached_prefix(worker, finished_output(worker, spec) + [1]) == 64


def test_overrun_after_a_stop_string_is_never_cached():
    worker = Worker()
    spec = request("r", 40, max_tokens=100)
    worker.land(spec)
    for _ in range(60):
        worker.step()
    worker.scheduler.drop_sample(key("r"), 0, 30)  # 70 tokens count
    assert cached_prefix(worker, finished_output(worker, spec)) == 64


def test_a_stop_string_found_after_the_sample_ended_by_itself_still_shortens_what_is_cached():
    worker = Worker()
    spec = request("r", 40, max_tokens=60)
    worker.land(spec)
    worker.run()
    worker.scheduler.drop_sample(key("r"), 0, 10)
    worker.scheduler.drop_sample(key("r"), 0, 10)
    assert cached_prefix(worker, finished_output(worker, spec)) == 48


def test_overrun_that_a_preemption_had_cached_is_forgotten():
    worker = Worker()
    spec = request("r", 40, max_tokens=100)
    worker.land(spec)
    for _ in range(60):
        worker.step()
    worker.scheduler._book.preempt_sample(worker.scheduler._book.running[0])
    worker.scheduler.drop_sample(key("r"), 0, 30)
    assert cached_prefix(worker, finished_output(worker, spec)) == 64


def test_a_dropped_request_leaves_its_prompt_in_the_cache_and_none_of_its_output():
    worker = Worker()
    spec = request("r", 40, max_tokens=100)
    worker.land(spec)
    for _ in range(60):
        worker.step()
    worker.scheduler.drop(key("r"))
    assert cached_prefix(worker, finished_output(worker, spec)) == 32


# local and colocated


def test_a_local_prompt_is_prefilled_in_chunks_beside_the_decodes():
    worker = Worker(chunk_tokens=32, max_batched_tokens=33)
    first, second = request("a", 20, max_tokens=30), request("b", 100, max_tokens=5)
    worker.land(first)
    worker.step()
    worker.local(second)
    sizes = []
    for _ in range(4):
        plan = worker.step()
        assert len(plan.decodes) == 1  # decodes first, in every step
        sizes += [chunk.num_tokens for chunk in plan.chunks]
    assert sizes == [32, 32, 32, 4]
    worker.run()
    worker.expect(first, second)


def test_a_step_never_exceeds_its_token_limit_and_a_running_sample_never_waits_for_prompts():
    worker = Worker(num_blocks=400, chunk_tokens=64, max_batched_tokens=64)
    spec = request("r", 20, max_tokens=40)
    worker.land(spec)
    worker.step()
    for number in range(30):
        worker.local(request(chr(33 + number), 100, max_tokens=1))
        plan = worker.step()
        assert plan.num_tokens <= 64 and any(sample.key == key("r") for sample in plan.decodes)


def test_a_resumed_stream_goes_on_where_it_stopped():
    worker = Worker()
    sampling = Sampling(max_tokens=10)
    tokens = list(range(20)) + [7, 8, 9]  # 20 of prompt, 3 generated elsewhere
    spec = DecodeRequest(key=key("r"), tokens=tokens, num_prompt=20, sampling=sampling)
    worker.local(spec)
    worker.run()
    assert len(worker.output[("r", 0)]) == 7


def test_four_cold_prompts_run_at_once_when_four_may():
    worker = Worker(max_running=4)
    for name in "abcdef":
        worker.local(request(name, 20, max_tokens=20))
    worker.step()
    assert [len(worker.step().decodes) for _ in range(3)] == [4, 4, 4]
    worker.run()
    worker.nothing_leaked()


def test_two_local_prompts_with_the_same_prefix_compute_it_once():
    worker = Worker(chunk_tokens=32)
    for name in "ab":
        worker.local(request(name, list(range(64)) + [ord(name)], max_tokens=2))
    chunks = [chunk for _ in range(4) for chunk in worker.step().chunks]
    assert sum(chunk.num_tokens for chunk in chunks) == 66


def test_small_prompts_pass_a_big_one_only_a_bounded_number_of_times():
    worker = Worker(num_blocks=65, max_overtakes=5)
    worker.land(request("h", 16 * 30, max_tokens=200))
    worker.step()
    worker.local(request("B", 16 * 40, max_tokens=1))
    passed = 0
    for number in range(40):
        worker.local(request(f"{chr(200 + number)}", 20, max_tokens=1))
        passed += len(worker.step().chunks)
    assert passed == 5
    worker.run()
    worker.nothing_leaked()


# memory


def overcommitted(num_blocks=34, **config):
    return Worker(num_blocks=num_blocks, forecast=Optimist(), landing_share=1.0, **config)


def test_two_requests_that_do_not_fit_together_both_finish_without_preemption_by_forecast():
    worker = Worker(num_blocks=34)
    specs = [request("a", 256, max_tokens=64), request("b", 256, max_tokens=64)]
    for spec in specs:
        worker.local(spec)
    worker.run()
    worker.expect(*specs)
    assert worker.preempted == []
    worker.nothing_leaked()


def test_the_younger_of_two_overcommitted_requests_is_preempted_and_comes_back():
    worker = overcommitted()
    specs = [request("a", 240, max_tokens=64), request("b", 240, max_tokens=64)]
    for spec in specs:
        worker.local(spec)
    worker.run()
    worker.expect(*specs)
    assert {name for name, _ in worker.preempted} == {key("b")} and len(worker.preempted) <= 3
    worker.nothing_leaked()


def test_eight_requests_in_a_far_too_small_pool_all_finish_with_few_preemptions():
    worker = overcommitted(num_blocks=65)
    specs = [request(name, 100, max_tokens=200) for name in "abcdefgh"]
    for spec in specs:
        worker.local(spec)
    worker.run()
    worker.expect(*specs)
    assert key("a") not in {name for name, _ in worker.preempted} and 0 < len(worker.preempted) < 40
    worker.nothing_leaked()


def test_the_lowest_priority_yields_before_the_youngest():
    worker = overcommitted(num_blocks=20, block_size=4)
    for name, priority in (("a", 0), ("b", 9), ("c", 0)):
        worker.local(request(name, 8, max_tokens=60, priority=priority))
    while not worker.preempted:
        worker.step()
    assert worker.preempted == [(key("b"), 0)]
    worker.run()
    worker.expect(*worker.specs.values())


def test_an_unfinished_landing_yields_before_anybody_is_preempted():
    worker = overcommitted(num_blocks=20, block_size=4)
    for name in "ab":
        worker.local(request(name, 8, max_tokens=30))
    worker.step()
    worker.land(request("l", 32, max_tokens=2), turns=9999)
    worker.land(request("m", 16, max_tokens=2), turns=9999)
    while not worker.yielded:
        worker.step()
    assert worker.yielded == [key("m")] and worker.preempted == []
    assert worker.pool.counts().draining > 0
    worker.reads.pop(key("m"))
    worker.scheduler.quiescent(key("m"))
    assert worker.take_gone() == [key("m")]
    worker.step()
    assert worker.preempted == [] and worker.yielded == [key("m")]


def test_a_read_that_never_becomes_quiescent_holds_the_oldest_up_only_for_a_moment():
    worker = overcommitted(num_blocks=20, block_size=4)
    for name in "ab":
        worker.local(request(name, 8, max_tokens=30))
    worker.step()
    worker.land(request("l", 32, max_tokens=2), turns=9999)
    for _ in range(150):
        worker.step()
    assert worker.yielded == [key("l")]
    assert worker.pool.counts().draining > 0  # stays out of the pool, counted
    assert len(worker.output[("a", 0)]) == len(worker.output[("b", 0)]) == 30


def test_what_was_preempted_comes_back_before_any_new_landing():
    worker = overcommitted(num_blocks=20, block_size=4)
    for name in "ab":
        worker.local(request(name, 8, max_tokens=60))
    while not worker.preempted:
        worker.step()
    assert worker.land(request("l", 4, max_tokens=2)) is None
    while not any(chunk.key == key("b") for chunk in worker.step().chunks):
        assert worker.landed == []
    worker.run()
    assert worker.landed == [key("l")]
    worker.expect(*worker.specs.values())


def test_a_landed_request_that_has_not_started_can_yield_and_still_starts():
    worker = overcommitted(num_blocks=20, block_size=4)
    worker.local(request("a", 8, max_tokens=60))
    worker.step()
    late = request("l", 32, max_tokens=5)
    worker.land(late, starts=False)
    while not worker.preempted:
        worker.step()
    assert worker.preempted == [(key("l"), COMMON)]
    worker.start(late)
    worker.run()
    worker.expect(*worker.specs.values())
    worker.nothing_leaked()


@pytest.mark.parametrize("times", [(1,), (16,), (17,), (50,), (20, 60)])
def test_a_request_preempted_anywhere_gives_the_same_tokens_and_none_twice(times):
    worker = Worker(chunk_tokens=16)
    spec = request("r", 3, max_tokens=100)
    worker.local(spec)
    preempted, book = [], worker.scheduler._book
    while worker.scheduler.has_work():
        num_generated = len(worker.output.get(("r", 0), []))
        if num_generated in times and num_generated not in preempted:
            preempted.append(num_generated)
            book.preempt_sample(book.running[0]) if book.running else book.preempt_common(book.requests[key("r")])
            worker.pool.evict_all()
        worker.step()
    worker.expect(spec)
    assert tuple(preempted) == times and worker.scheduler.num_recomputed_tokens > 0
    worker.nothing_leaked()


def test_what_a_preempted_sample_had_computed_is_found_again_while_nobody_needed_the_room():
    worker = Worker(chunk_tokens=16)
    spec = request("r", 20, max_tokens=40)
    worker.local(spec)
    for _ in range(20):
        worker.step()
    worker.scheduler._book.preempt_sample(worker.scheduler._book.running[0])
    (chunk,) = worker.step().chunks
    assert chunk.start == 32
    worker.run()
    worker.expect(spec)


@settings(max_examples=80, deadline=None, database=None)
@given(seed=st.integers(0, 2**32), num_blocks=st.sampled_from([20, 34, 64]), optimistic=st.booleans())
def test_whatever_happens_everything_not_dropped_finishes_and_nothing_leaks(seed, num_blocks, optimistic):
    rng = random.Random(seed)
    forecast = Optimist() if optimistic else Forecast()
    worker = Worker(
        num_blocks, 4, forecast, max_running=rng.choice([2, 4, 64]), chunk_tokens=8, max_batched_tokens=24,
        landing_share=rng.choice([0.25, 1.0]), max_overtakes=3,
    )  # fmt: skip
    specs, dropped, late = [], set(), []

    def arrive():
        name = f"r{len(specs)}"
        tokens = [rng.randrange(2)] * rng.randrange(1, 30) + [rng.randrange(9)] * rng.randrange(1, 10)
        spec = request(name, tokens, max_tokens=rng.randrange(2, 30), n=rng.choice([1, 1, 1, 2, 3]),
                       priority=rng.randrange(3))  # fmt: skip
        if not worker.scheduler.fits_ever(spec):
            return
        specs.append(spec)
        if rng.random() < 0.5:
            worker.local(spec)
        else:
            starts = rng.random() < 0.6
            worker.land(spec, turns=rng.randrange(1, 6), starts=starts)
            if not starts:
                late.append(spec)

    def disturb():
        if specs and rng.random() < 0.08:
            spec = rng.choice(specs)
            dropped.add(spec.key)
            worker.scheduler.drop(spec.key)
        if specs and rng.random() < 0.08:
            spec = rng.choice(specs)
            dropped.add(spec.key)  # its other samples are checked by the worker's cache, not by the count
            worker.scheduler.drop_sample(spec.key, rng.randrange(spec.sampling.n), 1)
        if late and rng.random() < 0.3:
            worker.start(late.pop(0))

    for _ in range(rng.randrange(60)):
        if rng.random() < 0.4:
            arrive()
        disturb()
        worker.step(during=disturb)
    for spec in late:
        worker.start(spec)
    worker.run()
    # a yielded landing went back to the coordinator: it is not this worker's any more
    alive = [spec for spec in specs if spec.key not in dropped and spec.key not in worker.yielded]
    worker.expect(*alive)
    assert len(worker.preempted) <= 20 * len(specs)
    worker.nothing_leaked()
    assert set(worker.take_gone()) == {spec.key for spec in specs}
