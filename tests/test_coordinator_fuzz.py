"""The core among workers and clients that do anything at any time.

Fake workers answer commands late, twice, or die; clients leave. Whatever happens: each request ends exactly once, the
client's tokens are the ones the sampling function gives at each position, and in the end nothing is promised.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from coordinator_stage import EOS, core_config, hello, submit
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from coordinator.events import (
    FromFront,
    FromSupervisor,
    FromWorker,
    FrontLost,
    HeartbeatSeen,
    ResetPeer,
    Send,
    Tick,
    WorkerLost,
)
from coordinator.machine import Machine
from pdserve import phases
from pdserve.messages import (
    Abandon,
    Counts,
    DrainWorker,
    Drop,
    DropSample,
    Ended,
    Failure,
    Heartbeat,
    Key,
    Land,
    Leave,
    Output,
    Prefill,
    Released,
    SampleEnded,
    Stamp,
    Start,
    StepReport,
    StopFound,
    Submit,
    TokenOut,
)

FAILURES = ("kv_unreadable", "owner_lost", "yielded", "handoff_timeout", "refused", "internal")
pick = st.integers(0, 10**6)


def sampled(prompt: tuple[int, ...], sample: int, position: int) -> int:
    """Sampling is a pure function (law 8): the same token wherever and however often it is drawn."""
    token = (prompt[0] * 31 + sample * 17 + position * 7) % 23 + 10
    return EOS if token == 20 else token


@dataclass
class Job:
    """One attempt on a fake worker."""

    command: Any  # Prefill or Land
    has_first: bool = False
    is_dropped: bool = False
    next_of: dict[int, int] = field(default_factory=dict)  # started sample -> position of its next token
    over: set[int] = field(default_factory=set)


@dataclass
class FakeWorker:
    epoch: str
    role: str
    is_alive: bool = True
    jobs: dict[Key, Job] = field(default_factory=dict)
    step: int = 0

    def hear(self, message: Any) -> None:
        match message:
            case Prefill() | Land():
                assert message.key not in self.jobs, message.key
                self.jobs[message.key] = Job(command=message)
            case Start() if message.key in self.jobs:
                assert message.sample not in self.jobs[message.key].over
                self.jobs[message.key].next_of[message.sample] = message.position + 1
            case DropSample() if message.key in self.jobs:
                self.jobs[message.key].over.add(message.sample)
            case Drop() if message.key in self.jobs:
                self.jobs[message.key].is_dropped = True


@dataclass
class Client:
    submit: Submit
    front: str
    text: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, SampleEnded] = field(default_factory=dict)
    ended: list[Ended] = field(default_factory=list)


class CoordinatorFuzz(RuleBasedStateMachine):
    @initialize(
        on_empty_pool=st.sampled_from(["fail", "queue", "local"]),
        disaggregate=st.sampled_from(["always", "auto", "never"]),
        router=st.sampled_from(["round_robin", "least_load", "power_of_two", "prefix_aware"]),
        pool=st.sampled_from([12, 40]),
    )
    def begin(self, on_empty_pool, disaggregate, router, pool):
        config = core_config(
            on_empty_pool=on_empty_pool,
            disaggregate=disaggregate,
            router=router,
            local_prefill_tokens=5,
            max_batched_tokens=10,
            queue_timeout_s=20,
            request_timeout_s=60,
            max_queued_requests=4,
            max_bypasses=2,
            max_attempts=4,
        )
        self.machine = Machine(config=config, core="c", stops_at_first=lambda token, stops: False)
        self.pool = pool
        self.now_s = 0.0
        self.workers: dict[str, FakeWorker] = {}
        self.clients: dict[tuple[str, int], Client] = {}
        self.num_epochs = 0
        for role in ("prefill", "prefill", "decode", "decode"):
            self.join(role)

    # --- the wire

    def tell(self, event: Any) -> None:
        actions = self.machine.step(event, self.now_s)
        self.machine.check()
        for action in actions:
            if isinstance(action, Send) and action.to in self.workers:
                worker = self.workers[action.to]
                if isinstance(action.message, Leave):
                    assert not worker.jobs, worker
                    worker.is_alive = False
                elif worker.is_alive:
                    worker.hear(action.message)
            elif isinstance(action, Send):
                self.client_hears(action.to, action.message)
            elif isinstance(action, ResetPeer):
                assert not self.machine.is_known(action.epoch)

    def client_hears(self, front: str, message: Any) -> None:
        client = self.clients[front, message.ticket]
        assert not client.ended, (client, message)
        match message:
            case Output():
                text = client.text.setdefault(message.sample, [])
                assert message.first == len(text) and message.sample not in client.ends, (client, message)
                text += [each.token for each in message.tokens]
                prompt = client.submit.prompt
                assert text == [sampled(prompt, message.sample, len(prompt) + at) for at in range(len(text))]
            case SampleEnded():
                assert message.sample not in client.ends
                client.ends[message.sample] = message
            case Ended():
                client.ended.append(message)
                self.judge(client, message)

    def judge(self, client: Client, ended: Ended) -> None:
        sampling = client.submit.sampling
        spent = [spent for _, spent in ended.phases_ns]
        assert min(spent) >= 0 and sum(spent) == round(self.now_s * 1e9) - client.submit.received_ns
        if ended.outcome == "finished":
            assert sorted(client.ends) == list(range(sampling.n))
            for sample, end in client.ends.items():
                text = client.text[sample][: end.num_generated]
                assert len(text) == end.num_generated <= sampling.max_tokens
                if end.reason == "length":
                    assert len(text) == sampling.max_tokens

    def say(self, worker: FakeWorker, message: Any) -> None:
        self.tell(FromWorker(worker.epoch, message))

    # --- workers

    def join(self, role: str) -> None:
        self.num_epochs += 1
        epoch = f"w{self.num_epochs}.e"
        self.workers[epoch] = FakeWorker(epoch=epoch, role=role)
        message = hello(f"w{self.num_epochs}", role, epoch, num_blocks=self.pool + 1, max_running=6)
        self.say(self.workers[epoch], message)

    def alive(self) -> list[FakeWorker]:
        return [worker for worker in self.workers.values() if worker.is_alive]

    def job(self, which: int) -> tuple[FakeWorker, Job] | None:
        jobs = [(worker, job) for worker in self.alive() for job in worker.jobs.values()]
        return jobs[which % len(jobs)] if jobs else None

    @rule(role=st.sampled_from(["prefill", "decode"]))
    def a_worker_joins(self, role):
        if len(self.alive()) < 6:
            self.join(role)

    @rule(which=pick)
    def a_worker_dies(self, which):
        if alive := self.alive():
            worker = alive[which % len(alive)]
            worker.is_alive = False
            self.tell(WorkerLost(worker.epoch, "killed"))
            worker.jobs.clear()

    @rule(which=pick)
    def a_worker_is_drained(self, which):
        if len(alive := self.alive()) > 3:
            self.tell(FromSupervisor(DrainWorker(worker=alive[which % len(alive)].epoch[:-2])))

    @rule(which=pick, count=st.integers(1, 4), repeats=st.booleans())
    def a_job_goes_on(self, which, count, repeats):
        if found := self.job(which):
            self.go_on(*found, count, repeats)

    def go_on(self, worker: FakeWorker, job: Job, count: int, repeats: bool = False) -> None:
        """Prefill and sample first tokens, or land and decode, as far as the commands so far allow."""
        command = job.command
        first = len(command.tokens)
        computes = isinstance(command, Prefill) or not command.owner
        outs: list[TokenOut] = []
        stamps = []
        if computes and not job.has_first:
            job.has_first = True
            outs = [self.draw(command, sample, first) for sample in range(command.sampling.n)]
            stamps = [
                self.stamp(command.key, phases.PREFILL_STARTED),
                self.stamp(command.key, phases.FIRST_TOKEN_READY),
            ]
        elif isinstance(command, Land) and job.next_of:
            stamps = [self.stamp(command.key, phases.TRANSFER_DONE), self.stamp(command.key, phases.JOINED)]
            for sample, position in list(job.next_of.items()):
                for _ in range(count):
                    token = self.draw(command, sample, position)
                    if sample in job.over:
                        break
                    outs.append(token)
                    position += 1
                    generated = position - command.num_prompt
                    if command.sampling.finish_reason(token.token, generated):
                        job.over.add(sample)
                job.next_of[sample] = position
        report = StepReport(tokens=tuple(outs), stamps=tuple(stamps))
        self.say(worker, report)
        if repeats and worker.is_alive:
            self.say(worker, report)

    def draw(self, command: Any, sample: int, position: int) -> TokenOut:
        token = sampled(command.tokens[: command.num_prompt], sample, position)
        return TokenOut(key=command.key, sample=sample, position=position, token=token, logprob=None, top=())

    def stamp(self, key: Key, name: str) -> Stamp:
        return Stamp(key=key, name=name, time_ns=round(self.now_s * 1e9) - 5, value=0)

    @rule(which=pick)
    def a_job_is_let_go(self, which):
        """Dropped ones on either side; on the prefill side also those that were read."""
        if found := self.job(which):
            worker, job = found
            if job.is_dropped or (isinstance(job.command, Prefill) and job.has_first):
                del worker.jobs[job.command.key]
                self.say(worker, Released(key=job.command.key))

    @rule(which=pick, kind=st.sampled_from(FAILURES))
    def a_job_fails(self, which, kind):
        if found := self.job(which):
            worker, job = found
            self.say(worker, Failure(key=job.command.key, kind=kind, reason="because"))

    @rule(which=pick)
    def a_job_skips_a_position(self, which):
        if found := self.job(which):
            worker, job = found
            token = self.draw(job.command, 0, len(job.command.tokens) + 50)
            self.say(worker, StepReport(tokens=(token,), stamps=()))

    @rule(which=pick)
    def a_heart_beats(self, which):
        if alive := self.alive():
            worker = alive[which % len(alive)]
            worker.step += 1
            counts = Counts(free=0, cached=0, held=0, landing=0, draining=0)
            beat = Heartbeat(
                worker="",
                epoch=worker.epoch,
                sent_ns=0,
                step=worker.step,
                deadline_ns=0,
                phase="serving",
                held=tuple(worker.jobs),
                leases=(),
                counts=counts,
                num_running=0,
                metrics=(),
            )
            self.tell(HeartbeatSeen(beat))

    @rule(which=pick)
    def the_dead_speak(self, which):
        dead = [worker for worker in self.workers.values() if not worker.is_alive]
        if dead:
            key = Key(request="r-c-1", attempt=1)
            self.say(dead[which % len(dead)], Released(key=key))

    # --- clients

    @rule(
        prompt=st.integers(1, 20),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        max_tokens=st.sampled_from([1, 2, 5, 12]),
        priority=st.integers(-1, 1),
        front=st.sampled_from(["f", "g"]),
        ignore_eos=st.booleans(),
    )
    def a_client_asks(self, prompt, n, max_tokens, priority, front, ignore_eos):
        message = submit(
            len(self.clients),
            prompt,
            n=n,
            max_tokens=max_tokens,
            priority=priority,
            ignore_eos=ignore_eos,
            received_ns=round(self.now_s * 1e9),
        )
        self.clients[front, message.ticket] = Client(submit=message, front=front)
        self.tell(FromFront(front, message))

    @precondition(lambda self: self.clients)
    @rule(which=pick)
    def a_client_leaves(self, which):
        front, ticket = list(self.clients)[which % len(self.clients)]
        self.tell(FromFront(front, Abandon(ticket=ticket, reason="left")))

    @precondition(lambda self: self.clients)
    @rule(which=pick, sample=st.integers(0, 2), num_generated=st.integers(0, 6))
    def a_stop_string_is_found(self, which, sample, num_generated):
        front, ticket = list(self.clients)[which % len(self.clients)]
        self.tell(FromFront(front, StopFound(ticket=ticket, sample=sample, num_generated=num_generated)))

    @rule()
    def a_front_end_dies(self):
        self.tell(FrontLost("g"))

    @rule(seconds=st.sampled_from([0.001, 0.1, 3.0, 25.0]))
    def time_passes(self, seconds):
        self.now_s += seconds
        self.tell(Tick())

    # --- the end

    def teardown(self):
        if not hasattr(self, "machine"):
            return
        for role in ("prefill", "decode"):
            self.join(role)
        for _ in range(200):
            self.now_s += 0.5
            self.tell(Tick())
            for worker in self.alive():
                for key, job in list(worker.jobs.items()):
                    if worker.is_alive and key in worker.jobs:
                        self.finish(worker, job)
            if not self.machine.num_live and not self.machine.num_promises:
                break
        assert self.machine.num_live == 0 and self.machine.num_promises == 0
        assert self.machine.next_deadline_s() is None
        for client in self.clients.values():
            assert len(client.ended) == 1, client

    def finish(self, worker: FakeWorker, job: Job) -> None:
        if job.is_dropped:
            del worker.jobs[job.command.key]
            self.say(worker, Released(key=job.command.key))
        else:
            self.go_on(worker, job, 3)


CoordinatorFuzz.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestCoordinatorFuzz = CoordinatorFuzz.TestCase
