"""What splitting a request costs: start-up, the first token's way out, and the gap before the second token.

Owns the questions and the arithmetic on their phases; the server stamps the times. Invariant: every prompt is new to
the server, so each time includes the whole prompt's transfer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median

from bench.arms import Answer, Ask, HttpArm, tokens_of
from bench.report import Check, Report, Row, at_most
from bench.serving import running_server
from bench.texts import random_prompts
from pdserve.errors import PDServeError
from pdserve.model.spec import read_spec
from pdserve.model.store import served_name

NUM_PROMPT, NUM_NEW = 512, 18  # tokens
HANDOFF_MS, FIRST_SEND_MS, READY_S = 15.0, 5.0, 15.0
NAMES = ("handoff_512", "first_token_sent", "ready")


def handoff_ms(phases: Mapping[str, float], num_new: int) -> float:
    """From the first token sampled to the second one sampled, less one decode step (the mean of the later ones)."""
    gap = sum(phases[name] for name in ("first_send", "handoff_tail", "decode_wait", "first_decode"))
    return gap - phases["decode"] / (num_new - 2)


def measure_handoff(report: Report, directory: Path, say: Callable[[str], None]) -> None:
    """Adds rows and checks; when no server gets ready, checks that say why."""
    options = report.options
    try:
        started = time.monotonic()
        with running_server(replace(options, model=options.model), ("--kv-link", "shm"), say) as base_url:
            ready_s = time.monotonic() - started
            say("hand-off of 512 tokens")
            arm = HttpArm(base_url, served_name(options.model))
            count = 8 if options.is_quick else 30
            vocab = range(256, read_spec(directory).vocab_size)
            prompts = random_prompts([NUM_PROMPT] * (count + 2), vocab, options.seed)
            answers = [arm.complete([Ask(prompt=prompt, num_new=NUM_NEW)])[0] for prompt in prompts]
            tokens_of(answers)
    except PDServeError as error:
        bounds = (f"<= {HANDOFF_MS:g} ms", f"<= {FIRST_SEND_MS:g} ms", f"<= {READY_S:g} s")
        for name, bound in zip(NAMES, bounds, strict=True):
            report.checks.append(Check(name=name, value=None, bound=bound, is_ok=None, reason=str(error)))
        return
    _judge(report, answers[2:])
    report.checks.append(at_most(NAMES[2], ready_s, READY_S, "s"))


def _judge(report: Report, answers: list[Answer]) -> None:
    handoff = median(handoff_ms(each.phases_ms, NUM_NEW) for each in answers)
    first_send = median(each.phases_ms["first_send"] for each in answers)
    about = {"prompt_tokens": NUM_PROMPT, "requests": len(answers), "modes": sorted({each.mode for each in answers})}
    report.rows.append(Row(name=NAMES[0], value=handoff, unit="ms", parameters=about))
    report.rows.append(Row(name=NAMES[1], value=first_send, unit="ms", parameters=about))
    report.checks.append(at_most(NAMES[0], handoff, HANDOFF_MS, "ms"))
    report.checks.append(at_most(NAMES[1], first_send, FIRST_SEND_MS, "ms"))
