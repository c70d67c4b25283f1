"""All answers of one HTTP request, and the account that is drawn up at the end.

Owns the choices (index = prompt * n + sample) and the terminal events; sends nothing but stop notices. Invariant: a
generation is complete only when every choice has ended and the core has ended every prompt without a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from coordinator.frontend.choice import Choice
from coordinator.frontend.detokenizer import TokenTable
from coordinator.frontend.envelope import ServiceError, internal_error
from coordinator.frontend.live import Event
from coordinator.frontend.prepare import Prepared
from pdserve.messages import Ended, Output, SampleEnded
from pdserve.phases import PHASES

StopFoundAt = Callable[[int, int, int], None]  # ticket, sample, number of tokens


class Generation:
    def __init__(
        self, prepared: Sequence[Prepared], *, stop: Sequence[str], table: TokenTable, on_stop: StopFoundAt
    ) -> None:
        self.prepared = prepared
        self._n = prepared[0].sampling.n
        self._on_stop = on_stop
        self._endings: list[Ended | None] = [None] * len(prepared)
        self._mode = ""
        self.choices = [
            Choice(prompt * self._n + sample, table=table, sampling=item.sampling, stop=stop)
            for prompt, item in enumerate(prepared)
            for sample in range(self._n)
        ]

    def apply(self, events: Sequence[tuple[int, Event]]) -> list[Choice]:
        """The choices with news, each once, in order of arrival. Raises ServiceError when a prompt failed."""
        touched: dict[int, Choice] = {}
        for prompt, event in events:
            if isinstance(event, Ended):
                self._end(prompt, event)
                continue
            if not 0 <= event.sample < self._n:
                raise internal_error()
            choice = self.choices[prompt * self._n + event.sample]
            self._step(choice, event)
            touched[choice.index] = choice
        return list(touched.values())

    def prompt_of(self, choice: Choice) -> Prepared:
        return self.prepared[choice.index // self._n]

    @property
    def mode(self) -> str:
        """How it was served, as far as is known; several prompts may differ."""
        modes = sorted({ended.mode for ended in self._endings if ended is not None and ended.mode})
        return ",".join(modes) or self._mode

    def usage(self) -> dict[str, Any]:
        num_prompt = sum(len(item.prompt) for item in self.prepared)
        num_completion = sum(choice.num_generated for choice in self.choices)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": sum(ended.cached_tokens for ended in self._ended())},
        }

    def phases(self) -> dict[str, Any]:
        """Where the time went; for several prompts, of each."""
        reports = [_phases(ended) for ended in self._ended()]
        return reports[0] if len(reports) == 1 else {"prompts": reports}

    def _ended(self) -> list[Ended]:
        return [ended for ended in self._endings if ended is not None]

    def _step(self, choice: Choice, event: Output | SampleEnded) -> None:
        if choice.is_over:
            return
        if isinstance(event, SampleEnded):
            choice.end(event)
            return
        self._mode = event.mode or self._mode
        choice.push(event)
        if choice.stop_found_at is not None:
            self._on_stop(event.ticket, event.sample, choice.stop_found_at)

    def _end(self, prompt: int, ended: Ended) -> None:
        if ended.outcome != "finished":
            raise failure_of(ended)
        own = self.choices[prompt * self._n : (prompt + 1) * self._n]
        if not all(choice.is_over for choice in own):
            raise internal_error()
        self._endings[prompt] = ended


def failure_of(ended: Ended) -> ServiceError:
    """What the core says about a request that did not finish, as an HTTP error."""
    status = ended.status if 400 <= ended.status <= 599 else 500
    message = ended.message or f"The request was {ended.outcome}"
    return ServiceError(
        message, status=status, code=ended.code or ended.outcome, retry_after_s=max(ended.retry_after_s, 0.0)
    )


def _phases(ended: Ended) -> dict[str, Any]:
    known = dict(ended.phases_ns)
    return {
        "mode": ended.mode,
        "prefill_worker": ended.prefill_worker,
        "decode_worker": ended.decode_worker,
        "cached_tokens": ended.cached_tokens,
        "attempts": ended.attempts,
        "phases_ms": {name: known.get(name, 0) / 1e6 for name in PHASES},
        "transfer_ms": ended.transfer_ns / 1e6,
        "transfer_overlap": ended.transfer_overlap,
    }
