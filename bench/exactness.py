"""`pdserve bench exactness`: served tokens equal what `transformers` generates, whatever road a request takes.

Owns the arms, which prompts each gets, and the time they may take; `judging` owns what counts as equal. Invariant: a
part that could not run is a check that is not ok, never a missing one.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench.arms import Ask, HttpArm, tokens_of
from bench.forced import forced_places, free_branches, rival_difference
from bench.inprocess import BLOCK_SIZE, Engine, InProcessArm
from bench.judging import branches, cacheable, verdict
from bench.references import Reference, references
from bench.report import BenchOptions, Check, Report, Row, at_least, at_most
from bench.serving import running_server
from bench.texts import cut, random_prompts, token_stream
from bench.tiny_models import FAMILIES, NUM_BYTES, save_tiny
from coordinator.frontend.tokenizer import load_tokenizer
from pdserve.errors import PDServeError
from pdserve.model.store import resolve, served_name
from pdserve.terminal import Progress

NUM_NEW = 48
NUM_DRAWN, NUM_DRAWN_NEW = 8, 16  # prompts and tokens of seeded sampling, half of the prompts with top_p
GROUP = 50  # requests at the same time
LIMIT_S = 57 * 60.0  # no part starts later
EDGES = (1, 2, 3, 7, 8, 31, 32, 63, 64, 125)  # blocks, with one token less and one more
WARM_SHARE = 0.9  # of what a prefix cache could save
POOL_GB, TINY_POOL_GB = 2.0, 0.25  # holds the prompts of a group; touching more only takes time

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Road:
    """One way to serve; `mode` is what every response must say."""

    name: str
    flags: tuple[str, ...]
    mode: str


MAIN = Road(name="1P1D shm", flags=("--kv-link", "shm"), mode="disaggregated")
ROADS = (
    Road(name="1P1D tcp", flags=("--kv-link", "tcp"), mode="disaggregated"),
    Road(name="2P2D", flags=("--prefill", "2", "--decode", "2"), mode="disaggregated"),
    Road(name="local", flags=("--disaggregate", "never"), mode="local"),
    Road(name="colocated", flags=("--prefill", "0"), mode="colocated"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    lengths: tuple[int, ...]  # of prompts, in tokens
    num_subset: int  # prompts on the other roads
    num_forced: int
    num_tiny: int  # prompts per family
    num_alone: int  # of the NUM_DRAWN prompts of seeded sampling, sent one by one too


def sizes(is_quick: bool) -> Sizes:
    if is_quick:
        lengths = (1, 15, 16, 17, 33, 100, 255, 512)
        return Sizes(lengths=lengths, num_subset=4, num_forced=2, num_tiny=4, num_alone=1)
    edges = (BLOCK_SIZE * blocks + off for blocks in EDGES for off in (-1, 0, 1))
    return Sizes(lengths=(*range(1, 101), *edges), num_subset=30, num_forced=20, num_tiny=20, num_alone=NUM_DRAWN)


def spread(items: Sequence[Reference], count: int) -> list[Reference]:
    """`count` of them, evenly over the lengths, the longest included."""
    ordered = sorted(items, key=lambda each: len(each.prompt))
    return [ordered[-1 - index * len(ordered) // count] for index in range(min(count, len(ordered)))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Seeded sampling: questions, and what one process alone answers."""

    asks: tuple[Ask, ...]
    wanted: tuple[tuple[int, ...], ...]


class Bench:
    """What the parts share: the report, the clock, and a salt that makes this run's first requests cold."""

    def __init__(self, options: BenchOptions, say: Say) -> None:
        self.options = options
        self.report = Report(options)
        self.say = say
        self.salt = secrets.token_hex(8)
        self._start_s = time.monotonic()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Whatever keeps the part from running becomes its check."""
        try:
            spent_s = time.monotonic() - self._start_s
            if spent_s > LIMIT_S:
                raise PDServeError(f"no time left after {spent_s:.0f} s")
            yield
        except PDServeError as error:
            self.report.checks.append(Check(name=name, value=None, bound="runs", is_ok=None, reason=str(error)))

    @contextmanager
    def arm(
        self, road: Road, directory: Path, *, dtype: str = "float32", pool_gb: float = POOL_GB
    ) -> Iterator[HttpArm]:
        model = str(directory)
        asked = replace(self.options, model=model)
        flags = ("--queue-timeout", "500", "--dtype", dtype, "--kv-memory-gb", f"{pool_gb:g}", *road.flags)
        flags += ("--kernels", self.options.kernels)
        with running_server(asked, flags, lambda text: self.say(f"{road.name}: {text}")) as base_url:
            yield HttpArm(base_url, served_name(model))

    def compare(self, arm: HttpArm, road: Road, chosen: Sequence[Reference], label: str) -> None:
        """Cold, then warm, in groups; rows with counts, checks on mismatches, cache and mode."""
        places: list[str] = []
        wrong, near, cached, modes = [0, 0], [0, 0], [0, 0], set[str]()
        for at in range(0, len(chosen), GROUP):
            group = chosen[at : at + GROUP]
            asks = [Ask(prompt=each.prompt, num_new=len(each.tokens), salt=self.salt) for each in group]
            for turn, word in enumerate(("cold", "warm")):
                self.say(f"{label}: {at} of {len(chosen)}, {word}")
                answers = arm.complete(asks)
                found = branches(group, tokens_of(answers))
                places += [f"{label}, {word}: {each}" for each in found]
                wrong[turn] += sum(each.kind == "mismatch" for each in found)
                near[turn] += sum(each.kind == "near tie" for each in found)
                cached[turn] += sum(each.cached_tokens for each in answers)
                modes |= {each.mode for each in answers}
        for text in places:
            self.report.say(text)
        about = {"arm": label, "prompts": len(chosen), "new_tokens": NUM_NEW}
        for turn, word in enumerate(("cold", "warm")):
            counts = {**about, "cache": word, "near_ties": near[turn], "cached_tokens": cached[turn]}
            self.report.rows.append(Row(name="mismatches", value=wrong[turn], unit="requests", parameters=counts))
        could = cacheable((len(each.prompt) for each in chosen), BLOCK_SIZE)
        self.report.checks += [
            at_most(f"{label}: mismatches", sum(wrong), 0, ""),
            at_most(f"{label}: cached tokens when cold", cached[0], 0, ""),
            at_least(f"{label}: share of whole blocks cached when warm", cached[1] / max(could, 1), WARM_SHARE, ""),
            at_most(f"{label}: modes other than {road.mode}", len(modes - {road.mode}), 0, ""),
        ]

    def draw(self, arm: HttpArm, label: str, drawn: Drawn, num_alone: int) -> None:
        """Seeded sampling: one by one and all at once, against the engine alone."""
        self.say(f"{label}: seeded sampling")
        single = [replace(ask, salt=f"{self.salt}1") for ask in drawn.asks[:num_alone]]
        alone = [tokens for ask in single for tokens in tokens_of(arm.complete([ask]))]
        batch = tokens_of(arm.complete([replace(ask, salt=f"{self.salt}8") for ask in drawn.asks]))
        for word, texts in (("alone", alone), ("in a batch", batch)):
            wrong = sum(text != other for text, other in zip(texts, drawn.wanted, strict=False))
            self.report.checks.append(at_most(f"{label}: seeded sampling {word}, mismatches", wrong, 0, ""))


def seeded(directory: Path, prompts: Sequence[Sequence[int]]) -> Drawn:
    """Temperature 1, a seed each, every second one with top_p 0.9; by the engine in this process, one at a time."""
    asks = [
        Ask(prompt=prompt, num_new=NUM_DRAWN_NEW, temperature=1.0, top_p=0.9 if index % 2 else 1.0, seed=1000 + index)
        for index, prompt in enumerate(prompts)
    ]
    arm = InProcessArm(Engine(directory, dtype="float32", num_blocks=256))
    return Drawn(asks=tuple(asks), wanted=tuple(arm.complete([ask])[0].tokens for ask in asks))


def main_model(bench: Bench, size: Sizes) -> None:
    """Every road in float32, then bfloat16 by forced tokens."""
    directory = resolve(bench.options.model)
    stream = token_stream(load_tokenizer(directory).encode, bench.options.seed)
    asked = cut(stream, [*size.lengths, *(3 + 10 * index for index in range(NUM_DRAWN))])
    prompts, unread = asked[: len(size.lengths)], asked[len(size.lengths) :]
    known = references(directory, prompts, NUM_NEW, say=bench.say)
    bench.say("seeded sampling, alone in one process")
    drawn = seeded(directory, unread)
    for road in (MAIN, *ROADS):
        if bench.options.base_url is not None and road is not MAIN:
            break
        with bench.part(road.name), bench.arm(road, directory) as arm:
            bench.compare(arm, road, known if road is MAIN else spread(known, size.num_subset), road.name)
            bench.draw(arm, road.name, drawn, size.num_alone)
    if bench.options.base_url is None:
        with bench.part("bfloat16"):
            forced(bench, directory, spread([each for each in known if len(each.prompt) <= 512], size.num_forced))


def forced(bench: Bench, directory: Path, chosen: Sequence[Reference]) -> None:
    """The reference's tokens through the real hand-off, then free text; transformers' own rounding bounds the rest."""
    rival = rival_difference(directory, chosen, bench.say)
    with bench.arm(MAIN, directory, dtype="bfloat16") as arm:
        bench.say("bfloat16: forced tokens")
        sides = forced_places(arm, directory, chosen, bench.salt, GROUP)
        largest = max(verdict(side).largest for side in sides)
        free = free_branches(arm, chosen, bench.salt, 2 * largest)
    report = bench.report
    for name, places in zip(("prefill", "decode"), sides, strict=True):
        found = verdict(places)
        about = {"worker": name, "places": found.num_places, "other_choices": found.num_other_choices}
        report.rows.append(Row(name="bfloat16_difference", value=found.largest, unit="logit", parameters=about))
        report.checks.append(at_most(f"bfloat16: {name}, other choices not excused", len(found.refused), 0, ""))
        for each in found.refused:
            report.say(f"bfloat16: {name}: {each}")
    for branch in free:
        report.say(f"bfloat16, free text: {branch}")
    wrong = sum(branch.kind == "mismatch" for branch in free)
    report.rows.append(Row(name="bfloat16_branches", value=len(free), unit="requests", parameters={"of": len(chosen)}))
    report.checks += [
        at_most("bfloat16: free text, branches not excused", wrong, 0, ""),
        at_most("bfloat16: largest difference, in units of transformers' own", largest / rival, 2, ""),
    ]


def tiny_models(bench: Bench, size: Sizes) -> None:
    """A random model of each family through a server of its own."""
    lengths = [1 + (37 * index) % 200 for index in range(size.num_tiny)]
    for family in FAMILIES:
        with bench.part(family), tempfile.TemporaryDirectory(prefix="pdserve-bench-") as folder:
            bench.say(f"{family}: a random model")
            directory = save_tiny(family, Path(folder) / family, bench.options.seed)
            prompts = random_prompts(lengths, range(NUM_BYTES), bench.options.seed)
            known = references(directory, prompts, NUM_NEW, say=bench.say)
            with bench.arm(MAIN, directory, pool_gb=TINY_POOL_GB) as arm:
                bench.compare(arm, MAIN, known, family)


def main(options: BenchOptions) -> int:
    """Runs it all; the exit status."""
    size = sizes(options.is_quick)
    torch.set_num_threads(1)
    with Progress() as say:
        bench = Bench(options, say)
        main_model(bench, size)
        if options.base_url is None:
            tiny_models(bench, size)
    return bench.report.finish()


if __name__ == "__main__":
    import argparse
    import sys

    parser = argparse.ArgumentParser(description="served tokens against transformers")
    parser.add_argument("--json")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--base-url")
    asked = parser.parse_args()
    sys.exit(main(BenchOptions(json=asked.json, is_quick=asked.quick, base_url=asked.base_url)))
