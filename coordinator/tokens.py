"""Tokens and stamps from workers: what is accepted, and what follows from it.

Owns law 6: the core accepts exactly the next position of each sample, ignores lower ones, and takes a higher one for a
broken worker, since sessions lose nothing. Invariant: what was accepted goes to the front end in the same step, before
anything that follows from it.
"""

from __future__ import annotations

from coordinator.attempts import give_up
from coordinator.live import Live, Placement, Sample
from coordinator.outcomes import FINISHED, drop_sample, end, end_sample
from coordinator.workers import Worker
from coordinator.world import StopsAtFirst, World
from pdserve import phases
from pdserve.messages import Failure, Output, Stamp, Start, StepReport, StopFound, TokenOut, TokenText

Batch = list[TokenOut]


class Tokens:
    def __init__(self, world: World, stops_at_first: StopsAtFirst) -> None:
        self._world = world
        self._stops_at_first = stops_at_first

    def report(self, worker: Worker, report: StepReport) -> None:
        for stamp in report.stamps:
            self._stamp(worker, stamp)
        batches: dict[tuple[Live, int], Batch] = {}
        for token in report.tokens:
            live = self._world.lives.placed(token.key)
            if live is None or live.placement is None or worker.epoch not in live.placement.workers:
                self._world.ignore("old_attempt")
                self._discard(1)
            elif not 0 <= token.sample < len(live.samples):
                self._world.ignore("unknown_sample")
            else:
                self._accept(worker, live, token, batches)
        for (live, index), batch in batches.items():
            self._pass_on(live, live.samples[index], batch)
        for live in {live: None for live, _ in batches}:
            self._conclude(live)

    def stop(self, live: Live, message: StopFound) -> None:
        """The front end found a stop string; what was accepted beyond it is no output."""
        sample = live.samples[message.sample] if 0 <= message.sample < len(live.samples) else None
        if sample is not None and sample.is_over and 1 <= message.num_generated < len(sample.tokens):
            drop_sample(self._world, live, sample, message.num_generated)  # nothing of its overrun is kept
        if sample is None or sample.is_over or not 1 <= message.num_generated <= len(sample.tokens):
            self._world.ignore("late_stop")
            return
        num_over = len(sample.tokens) - message.num_generated
        self._discard(num_over)
        del sample.tokens[message.num_generated :]
        drop_sample(self._world, live, sample)  # before it is over: the worker keeps nothing of the overrun
        end_sample(self._world, live, sample, "stop", is_timed=not num_over)
        if live.is_over:
            end(self._world, live, FINISHED)

    def _stamp(self, worker: Worker, stamp: Stamp) -> None:
        world = self._world
        live = world.lives.placed(stamp.key)
        if live is None or live.placement is None or worker.epoch not in live.placement.workers:
            world.ignore("old_attempt")
            return
        if stamp.name not in phases.WORKER_STAMPS:
            world.ignore("unknown_stamp")
            return
        live.clock.stamp(stamp.name, stamp.time_ns, world.now_ns)
        if stamp.name == phases.PREFILL_STARTED:
            live.placement.num_cached = min(stamp.value, live.placement.num_tokens)
            if not any(sample.tokens for sample in live.samples):
                live.num_cached = min(stamp.value, live.num_prompt)
        elif stamp.name == phases.FIRST_TOKEN_READY:
            self._prefilled(worker, live, live.placement)
        elif stamp.name in (phases.TRANSFER_DONE, phases.JOINED) and worker.epoch == live.placement.decode:
            self._landed(live, live.placement)

    def _accept(self, worker: Worker, live: Live, token: TokenOut, batches: dict[tuple[Live, int], Batch]) -> None:
        world, placement, sample = self._world, live.placement, live.samples[token.sample]
        assert placement is not None
        expected = live.num_prompt + len(sample.tokens)
        if token.position == placement.num_tokens:
            self._prefilled(worker, live, placement)
        elif token.position > placement.num_tokens and worker.epoch == placement.decode:
            self._landed(live, placement)
        if sample.is_over:
            self._discard(1)
        elif token.position < expected:
            world.ignore("low_position")
        elif token.position > expected:
            reason = f"{worker.name} sent position {token.position} of sample {sample.index}, not {expected}"
            for (other, index), batch in list(batches.items()):
                if other is live:
                    self._pass_on(live, live.samples[index], batch)
                    del batches[other, index]
            if not self._conclude(live):
                failure = Failure(key=placement.key, kind="internal", reason=reason)
                give_up(world, live, failure, culprit=worker.epoch)
        else:
            self._take(worker, live, sample, token)
            batches.setdefault((live, sample.index), []).append(token)

    def _take(self, worker: Worker, live: Live, sample: Sample, token: TokenOut) -> None:
        world, sampling = self._world, live.submit.sampling
        sample.tokens.append(token.token)
        num_generated = len(sample.tokens)
        live.clock.accepted(world.now_ns)
        sample.reason = sampling.finish_reason(token.token, num_generated)
        if num_generated == 1:
            sample.first_ns = world.now_ns
            if sample.reason is None and sampling.min_tokens <= 1 and live.submit.stop:
                sample.reason = "stop" if self._stops_at_first(token.token, live.submit.stop) else None
        else:
            live.clock.stamp(phases.SECOND_TOKEN, world.now_ns, world.now_ns)
            gap_s = (world.now_ns - sample.last_ns) / 1e9
            world.tally.observe("pdserve_itl_seconds", gap_s)
            if num_generated > 2 and live.placement and token.position > live.placement.num_tokens + 1:
                worker.learn_step(gap_s, world.ledger.book(worker.epoch).num_samples)
        sample.last_ns = world.now_ns
        self._grow(live, token.position)

    def _grow(self, live: Live, position: int) -> None:
        """The ledger follows a stream one token ahead: prompt + generated + 1."""
        placement, layout = live.placement, self._world.workers.layout
        assert placement is not None and layout is not None
        if placement.decode and (position + 1) % layout.block_size == 0:
            self._world.ledger.grow(placement.decode, placement.key, 1)

    def _pass_on(self, live: Live, sample: Sample, batch: Batch) -> None:
        world, placement = self._world, live.placement
        assert placement is not None
        if live.clock.first_sent_ns is None:
            live.clock.sent_first(world.now_ns)
            world.tally.observe("pdserve_ttft_seconds", max(0, world.now_ns - live.submit.received_ns) / 1e9)
        tokens = tuple(TokenText(token=each.token, logprob=each.logprob, top=each.top) for each in batch)
        first = batch[0].position - live.num_prompt
        ticket, mode = live.submit.ticket, placement.mode
        world.send(live.front, Output(ticket=ticket, sample=sample.index, first=first, tokens=tokens, mode=mode))
        if sample.reason is not None:
            end_sample(world, live, sample, sample.reason)
            if batch[-1].position == placement.num_tokens:
                drop_sample(world, live, sample)
        elif batch[-1].position == placement.num_tokens and placement.decode:
            self._let_start(live, placement, batch[-1])

    def _let_start(self, live: Live, placement: Placement, token: TokenOut) -> None:
        start = Start(key=placement.key, sample=token.sample, position=token.position, token=token.token)
        self._world.send(placement.decode, start)

    def _conclude(self, live: Live) -> bool:
        """End the request if all its samples are over."""
        if live.is_over:
            end(self._world, live, FINISHED)
        return live.is_over

    def _prefilled(self, worker: Worker, live: Live, placement: Placement) -> None:
        placement.is_prefilled = True
        computing = placement.prefill or placement.decode
        if worker.epoch == computing and self._world.ledger.prefilled(computing, placement.key):
            self._world.make_room()
            seconds = live.clock.seconds(phases.PREFILL_STARTED, phases.FIRST_TOKEN_READY)
            worker.learn_prefill(placement.num_tokens - placement.num_cached, seconds or 0.0)
        if not placement.prefill:
            self._landed(live, placement)
        elif placement.decode and not placement.is_landed and placement.landing_due_s is None:
            placement.landing_due_s = self._world.now_s + self._world.config.timeouts.handoff_wait_s
            self._world.timers.push(live)

    def _landed(self, live: Live, placement: Placement) -> None:
        if placement.is_landed:
            return
        placement.is_landed = True
        if placement.landing_due_s is not None:
            placement.landing_due_s = None
            self._world.timers.push(live)
        if self._world.ledger.landed(placement.decode, placement.key):
            self._world.make_room()

    def _discard(self, num_tokens: int) -> None:
        if num_tokens:
            self._world.tally.count("pdserve_discarded_tokens_total", num_tokens)
