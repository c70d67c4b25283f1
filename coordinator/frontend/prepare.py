"""A parsed request to what the core is sent: token ids and complete sampling parameters.

Owns tokenization, the context limit and the drawing of seeds. Invariant: everything here may run in any thread, and
what it returns can be computed by the engine as it is.
"""

from __future__ import annotations

import dataclasses
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.frontend.chat import ChatTemplate
from coordinator.frontend.context import fit, refuse_too_long
from coordinator.frontend.prompts import Prompt
from coordinator.frontend.tokenizer import TextTokenizer
from coordinator.frontend.validate import Parsed
from pdserve.errors import RequestError
from pdserve.request import Sampling

QUICK_CHARS = 2048  # text this short is tokenized faster than a thread is woken


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """One prompt of a request."""

    prompt: tuple[int, ...]
    sampling: Sampling


def seed_source(seed: int | None) -> Callable[[], int]:
    """Draws seeds of 64 bits; unpredictable ones unless told a seed."""
    if seed is None:
        return lambda: secrets.randbits(64)
    generator = random.Random(seed)
    return lambda: generator.getrandbits(64)


class Preparer:
    def __init__(self, tokenizer: TextTokenizer, template: ChatTemplate, *, vocab_size: int, limit_s: float) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._vocab_size = vocab_size
        self._limit_s = limit_s  # of rendering

    def is_quick(self, parsed: Parsed) -> bool:
        """Whether `prepare` takes about a millisecond at most."""
        if parsed.kind == "chat":
            return False
        return sum(len(prompt) for prompt in parsed.prompts if isinstance(prompt, str)) <= QUICK_CHARS

    def prepare(self, parsed: Parsed, *, limit: int, seed: int) -> tuple[Prepared, ...]:
        """`limit` is the most tokens a request can ever have, prompt and output together."""
        param = "messages" if parsed.kind == "chat" else "prompt"
        if parsed.kind == "chat":
            prompts: list[Sequence[int]] = [self._template.encode(parsed.messages, limit=limit, limit_s=self._limit_s)]
        else:
            prompts = [self._encode(prompt, limit) for prompt in parsed.prompts]
        return tuple(self._complete(tuple(prompt), parsed, limit=limit, seed=seed, param=param) for prompt in prompts)

    def _encode(self, prompt: Prompt, limit: int) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        refuse_too_long(self._tokenizer, prompt, limit, "prompt")
        return self._tokenizer.encode_prompt(prompt)

    def _complete(self, prompt: tuple[int, ...], parsed: Parsed, *, limit: int, seed: int, param: str) -> Prepared:
        if not prompt:
            raise RequestError(f"'{param}' has no tokens", param=param, code="empty_prompt")
        if max(prompt) >= self._vocab_size:
            raise RequestError(f"'{param}' holds tokens the model does not have", param=param, code="invalid_value")
        max_tokens = fit(
            limit=limit,
            num_prompt=len(prompt),
            max_tokens=parsed.max_tokens,
            prompt_param=param,
            tokens_param=parsed.max_tokens_name,
        )
        if parsed.sampling.min_tokens > max_tokens:
            message = f"'min_tokens' is {parsed.sampling.min_tokens}, but at most {max_tokens} can be generated"
            raise RequestError(message, param="min_tokens", code="invalid_value")
        return Prepared(prompt=prompt, sampling=dataclasses.replace(parsed.sampling, max_tokens=max_tokens, seed=seed))
