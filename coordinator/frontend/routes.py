"""The small routes: models, tokenizer, liveness, readiness, metrics.

Owns their bodies. Invariant: /health says only that this process answers; /ready says that a request would be served.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from coordinator.frontend.context import refuse_too_long
from coordinator.frontend.envelope import ClientLeftError, ServiceError
from coordinator.frontend.fields import Fields, refuse
from coordinator.frontend.front import Front
from coordinator.frontend.http import Receive, Scope, Send, read_json, send_bytes, send_error, send_json
from coordinator.frontend.metrics import CONTENT_TYPE
from coordinator.frontend.prompts import read_messages
from coordinator.frontend.validate import read_model, unknown_model
from pdserve.errors import PDServeError, RequestError


class Get:
    """An ASGI endpoint over a function of the scope that gives a status and a body."""

    def __init__(self, answer: Callable[[Scope], Awaitable[tuple[int, Any]]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            status, body = await self._answer(scope)
        except PDServeError as error:
            await send_error(send, error)
            return
        await send_json(send, status, body)


class Post:
    """An ASGI endpoint over a function of a JSON body."""

    def __init__(self, front: Front, answer: Callable[[Fields], Awaitable[Any]]) -> None:
        self._http = front.config.http
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        timeout_s, max_bytes = self._http.client_stall_timeout_s, self._http.max_body_bytes
        try:
            body = await read_json(scope, receive, max_bytes=max_bytes, timeout_s=timeout_s)
            answer = await self._answer(Fields(body))
        except ClientLeftError:
            return
        except PDServeError as error:
            await send_error(send, error)
            return
        await send_json(send, 200, answer)


class Routes:
    def __init__(self, front: Front, *, started: int) -> None:
        self._front = front
        self._started = started  # Unix time, s

    async def models(self, scope: Scope) -> tuple[int, Any]:
        return 200, {"object": "list", "data": [self._model(name) for name in self._front.config.served_names]}

    async def model(self, scope: Scope) -> tuple[int, Any]:
        name = scope["path"].removeprefix("/v1/models/")
        if name not in self._front.config.served_names:
            raise unknown_model(name, self._front.model)
        return 200, self._model(name)

    async def health(self, scope: Scope) -> tuple[int, Any]:
        return 200, {"status": "ok"}

    async def ready(self, scope: Scope) -> tuple[int, Any]:
        front = self._front
        if front.is_leaving:
            return 503, {"status": "not ready", "reason": "shutting down"}
        try:
            reply = await front.client.probe(front.config.ready_timeout_s)
        except ServiceError as error:
            return 503, {"status": "not ready", "reason": error.message}
        detail = _object(reply.detail)
        return (200 if reply.is_ready else 503), {"status": "ready" if reply.is_ready else "not ready", **detail}

    async def metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            core = await self._front.client.query("metrics", self._front.config.ready_timeout_s)
        except ServiceError:
            core = ""  # the scraper still gets this process, whose page then says that the core is gone
        is_up = f"# TYPE pdserve_core_up gauge\npdserve_core_up {int(bool(core))}\n"
        await send_bytes(send, 200, self._front.metrics.page(core + "\n" + is_up), [(b"content-type", CONTENT_TYPE)])

    async def tokenize(self, fields: Fields) -> dict[str, Any]:
        front = self._front
        limit = front.config.max_model_len
        read_model(fields, front.model, is_required=False)
        if fields.value("messages") is not None:
            messages = read_messages(fields, max_model_len=limit)
            limit_s = front.config.render_timeout_s
            tokens = await front.in_thread(lambda: front.template.encode(messages, limit=limit, limit_s=limit_s))
        else:
            name = "content" if fields.value("content") is not None else "prompt"
            given = fields.text(name, front.config.http.max_body_bytes)
            if given is None:
                raise RequestError("'prompt' is required", param="prompt", code="missing_required_parameter")
            text: str = given
            adds_prefix = _adds_prefix(fields, default=name == "prompt")

            def encode() -> list[int]:
                refuse_too_long(front.tokenizer, text, limit, name)
                return front.tokenizer.encode_prompt(text) if adds_prefix else front.tokenizer.encode(text)

            tokens = await front.in_thread(encode)
        return {"count": len(tokens), "max_model_len": limit, "tokens": tokens}

    async def detokenize(self, fields: Fields) -> dict[str, Any]:
        front = self._front
        read_model(fields, front.model, is_required=False)
        if fields.value("tokens") is None:
            raise refuse("tokens", "a list of token ids", None)
        most = max(front.config.max_model_len, 1)
        tokens = fields.token_ids("tokens", vocab_size=front.config.vocab_size, max_items=most)
        text = front.tokenizer.spell(list(tokens))
        return {"prompt": text, "content": text}

    def _model(self, name: str) -> dict[str, Any]:
        config = self._front.config
        length, decode = config.max_model_len, config.decode_weights
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "pdserve",
            "max_model_len": length,
            "context_length": length,
            "weights": {"prefill": config.dtype, "decode": decode if decode == "int8" else config.dtype},
        }


def _adds_prefix(fields: Fields, *, default: bool) -> bool:
    """vLLM's and llama.cpp's names for the same switch."""
    name = "add_special" if fields.value("add_special") is not None else "add_special_tokens"
    return default if fields.value(name) is None else fields.boolean(name)


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {"reason": text}
    return found if isinstance(found, dict) else {"detail": found}
