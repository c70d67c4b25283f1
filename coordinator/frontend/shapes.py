"""Bodies of chat and text completions as OpenAI publishes them, whole and in chunks.

Owns the JSON of results; decides nothing about them. Invariant: all chunks of a stream share id, created, model and
object, and `finish_reason` is present in each and set in exactly one per index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.frontend.choice import Choice, Piece
from coordinator.frontend.detokenizer import TokenTable
from coordinator.frontend.generation import Generation
from coordinator.frontend.logprobs import chat_logprobs, completion_logprobs
from coordinator.frontend.validate import Parsed

_OBJECTS = {
    ("chat", True): "chat.completion.chunk",
    ("chat", False): "chat.completion",
    ("completion", True): "text_completion",
    ("completion", False): "text_completion",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One response's identity and the options that show in it."""

    id: str
    created: int  # Unix time, s
    parsed: Parsed
    table: TokenTable

    @property
    def is_chat(self) -> bool:
        return self.parsed.kind == "chat"

    def full(self, generation: Generation, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The answer to a request that did not ask for a stream; `pieces` are the whole choices, by index."""
        choices = [
            self._whole(choice, piece, generation) for choice, piece in zip(generation.choices, pieces, strict=True)
        ]
        body = self._body(choices)
        body["usage"] = generation.usage()
        if self.parsed.returns_token_ids and self.is_chat:
            body["prompt_token_ids"] = list(generation.prepared[0].prompt)
        if self.parsed.includes_phases:
            body["pdserve"] = generation.phases()
        return body

    def first(self, choice: Choice, generation: Generation) -> dict[str, Any] | None:
        """The chunk that opens a choice, if it has one: the role, and the prompt's ids where asked for."""
        body = None
        if self.is_chat:
            body = self._chunk(choice, {"delta": {"role": "assistant", "content": ""}})
            if self.parsed.returns_token_ids:
                body["prompt_token_ids"] = list(generation.prompt_of(choice).prompt)
        elif self.parsed.returns_token_ids:
            body = self._chunk(choice, {"text": ""})
            body["choices"][0]["prompt_token_ids"] = list(generation.prompt_of(choice).prompt)
        return body

    def delta(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        news: dict[str, Any] = {"delta": {"content": piece.text}} if self.is_chat else {"text": piece.text}
        return self._chunk(choice, news | self._extras(piece))

    def last(self, choice: Choice) -> dict[str, Any]:
        news: dict[str, Any] = {"delta": {}} if self.is_chat else {"text": ""}
        return self._chunk(choice, news, finish_reason=choice.finish_reason)

    def closing(self, generation: Generation) -> dict[str, Any] | None:
        """The chunk without choices at the end, if usage or phases were asked for."""
        if not self.parsed.includes_usage and not self.parsed.includes_phases:
            return None
        body = self._body([])
        if self.parsed.includes_usage:
            body["usage"] = generation.usage()
        if self.parsed.includes_phases:
            body["pdserve"] = generation.phases()
        return body

    def wants_tokens(self) -> bool:
        """Whether tokens show in the response beside their text."""
        return self.parsed.sampling.num_logprobs >= 0 or self.parsed.returns_token_ids

    def _whole(self, choice: Choice, piece: Piece, generation: Generation) -> dict[str, Any]:
        news: dict[str, Any]
        if self.is_chat:
            news = {"message": {"role": "assistant", "content": piece.text, "refusal": None}}
        else:
            news = {"text": piece.text}
        body = {"index": choice.index, **news, "logprobs": None, "finish_reason": choice.finish_reason}
        body |= self._extras(piece)
        if self.parsed.returns_token_ids and not self.is_chat:
            body["prompt_token_ids"] = list(generation.prompt_of(choice).prompt)
        return body

    def _extras(self, piece: Piece) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        num_top = self.parsed.sampling.num_logprobs
        if num_top >= 0 and piece.tokens:
            shape = chat_logprobs if self.is_chat else completion_logprobs
            extras["logprobs"] = shape(piece.tokens, self.table, num_top)
        if self.parsed.returns_token_ids:
            extras["token_ids"] = [info.token for info in piece.tokens]
        return extras

    def _chunk(self, choice: Choice, news: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        news.setdefault("logprobs", None)
        body = self._body([{"index": choice.index, **news, "finish_reason": finish_reason}])
        if self.parsed.includes_usage:
            body["usage"] = None
        return body

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": _OBJECTS[self.parsed.kind, self.parsed.is_stream],
            "created": self.created,
            "model": self.parsed.model,
            "choices": choices,
        }
