"""Ways to have prompts completed that must all give the same tokens, behind one small protocol.

Owns the question, the answer and the HTTP way; `inprocess` owns the way without a server. Invariant: answers come in
the order of the questions, and a question that failed is an answer that says why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from pdserve.errors import PDServeError

TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A completion of token ids. Greedy unless a temperature is given; the end-of-text token does not end it."""

    prompt: Sequence[int]
    num_new: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    forced: int | None = None  # a token biased so strongly that it is drawn
    num_logprobs: int | None = None
    salt: str = ""  # of the prefix cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    tokens: tuple[int, ...]
    cached_tokens: int = 0
    mode: str = ""
    top: tuple[Mapping[str, float], ...] = ()  # log-probabilities by spelling, per token
    phases_ms: Mapping[str, float] = field(default_factory=dict)
    error: str = ""


class Arm(Protocol):
    def complete(self, asks: Sequence[Ask]) -> list[Answer]:
        """All at the same time."""


class HttpArm:
    """A server's /v1/completions."""

    def __init__(self, base_url: str, model: str) -> None:
        self._base_url = base_url
        self._model = model

    def complete(self, asks: Sequence[Ask]) -> list[Answer]:
        return asyncio.run(self._all(asks))

    async def _all(self, asks: Sequence[Ask]) -> list[Answer]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self._base_url, timeout=TIMEOUT_S, limits=limits, trust_env=False
        ) as client:
            return list(await asyncio.gather(*(self._one(client, ask) for ask in asks)))

    async def _one(self, client: httpx.AsyncClient, ask: Ask) -> Answer:
        try:
            response = await client.post("/v1/completions", json=body(ask, self._model))
            if response.status_code != 200:
                return Answer(tokens=(), error=f"status {response.status_code}: {response.text[:200]}")
            return answer(response.json())
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            return Answer(tokens=(), error=f"{type(error).__name__}: {error}")


def body(ask: Ask, model: str) -> dict[str, Any]:
    """The request as the API takes it."""
    fields: dict[str, Any] = {
        "model": model,
        "prompt": list(ask.prompt),
        "max_tokens": ask.num_new,
        "temperature": ask.temperature,
        "top_p": ask.top_p,
        "seed": ask.seed,
        "ignore_eos": True,
        "return_token_ids": True,
        "include_phases": True,
    }
    if ask.forced is not None:
        fields["logit_bias"] = {str(ask.forced): 100}
    if ask.num_logprobs is not None:
        fields["logprobs"] = ask.num_logprobs
    if ask.salt:
        fields["cache_salt"] = ask.salt
    return fields


def answer(content: Mapping[str, Any]) -> Answer:
    """From a response's JSON; raises LookupError or TypeError when it has another shape."""
    choice = content["choices"][0]
    details = content["usage"].get("prompt_tokens_details") or {}
    logprobs = choice.get("logprobs") or {}
    about = content.get("pdserve") or {}
    return Answer(
        tokens=tuple(choice["token_ids"]),
        cached_tokens=int(details.get("cached_tokens") or 0),
        mode=str(about.get("mode") or ""),
        top=tuple(logprobs.get("top_logprobs") or ()),
        phases_ms=dict(about.get("phases_ms") or {}),
    )


def tokens_of(answers: Sequence[Answer]) -> list[tuple[int, ...]]:
    """The tokens of every answer; raises PDServeError when one failed."""
    failed = [each.error for each in answers if each.error]
    if failed:
        raise PDServeError(f"{len(failed)} of {len(answers)} requests failed, the first with: {failed[0]}")
    return [each.tokens for each in answers]
