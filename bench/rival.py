"""`transformers` as the rival of the engine bench: eager `generate` in bfloat16, timed token by token.

Owns the rival's run; times nothing of ours. Invariant: only the rival's own work lies between the two stamps of a
time, whatever is run in between its steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class Rival:
    def __init__(self, directory: Path) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.bfloat16, attn_implementation="eager"
        ).eval()
        self._model.generation_config.eos_token_id = None

    def prefill_s(self, num_tokens: int) -> float:
        """`generate` of one token from one prompt."""
        start = time.perf_counter()
        self._generate(1, num_tokens, 1, [])
        return time.perf_counter() - start

    def decode_s(self, batch: int, num_prompt: int, num_steps: int, between: Callable[[int], None]) -> list[float]:
        """Each decode step of one `generate`; before each, `between(context of that step)` runs on the same core."""
        turns = _Turns(num_prompt, between)
        self._generate(batch, num_prompt, num_steps + 1, [turns])
        return turns.times_s[:num_steps]

    def _generate(self, batch: int, num_prompt: int, num_new: int, criteria: list[Any]) -> None:
        ids = (7 * torch.arange(batch * num_prompt) + 11).remainder(self._model.config.vocab_size)
        ids = ids.view(batch, num_prompt)
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_new,
            pad_token_id=0,
            use_cache=True,
            stopping_criteria=criteria,
        )


class _Turns:
    """A stopping criterion that never stops: `generate` calls it after every token."""

    def __init__(self, num_prompt: int, between: Callable[[int], None]) -> None:
        self.times_s: list[float] = []
        self._context = num_prompt
        self._between = between
        self._resumed_s: float | None = None

    def __call__(self, ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        now_s = time.perf_counter()
        if self._resumed_s is not None:
            self.times_s.append(now_s - self._resumed_s)
        self._context += 1
        self._between(self._context)
        self._resumed_s = time.perf_counter()
        return torch.zeros(ids.shape[0], dtype=torch.bool)
