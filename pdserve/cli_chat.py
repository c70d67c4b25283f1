"""`pdserve chat`: a conversation on the terminal, streamed, with the phases of each answer below it.

Owns the client side of one streamed chat completion; keeps the conversation. Invariant: what is printed is what the
stream said, and an answer that failed never becomes part of the conversation.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from pdserve.config import runtime_folder
from pdserve.errors import ConfigError, PDServeError

ApiKeyFile = Annotated[Path | None, typer.Option("--api-key-file", help="file with the API key")]
BaseUrl = Annotated[str | None, typer.Option("--base-url", help="the server (default: the only one here)")]


@dataclass(slots=True)
class Answer:
    """What one stream has said so far."""

    text: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    phases: dict[str, Any] = field(default_factory=dict)


def deltas(lines: Iterable[str], answer: Answer) -> Iterator[str]:
    """New text of each event; usage and phases go into `answer`. Raises `PDServeError` on an error event."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise PDServeError(f"the server says: {event['error'].get('message', event['error'])}")
        answer.usage = event.get("usage") or answer.usage
        answer.phases = event.get("pdserve") or answer.phases
        for choice in event.get("choices", []):
            text = choice.get("delta", {}).get("content") or ""
            if text:
                answer.text.append(text)
                yield text
    raise PDServeError("the stream ended before it was done")


def phase_line(answer: Answer) -> str:
    """Where the time went, in one line."""
    about, usage = answer.phases, answer.usage
    workers = [name for name in (about.get("prefill_worker"), about.get("decode_worker")) if name]
    phases = {name: value for name, value in about.get("phases_ms", {}).items() if value >= 0.05}
    parts = [
        about.get("mode", ""),
        " -> ".join(workers),
        f"{usage.get('prompt_tokens', '?')} prompt tokens, {about.get('cached_tokens', 0)} cached",
        f"{usage.get('completion_tokens', '?')} tokens",
        ", ".join(f"{name} {value:.1f}" for name, value in phases.items()) + " ms" if phases else "",
    ]
    return " | ".join(part for part in parts if part)


class Client:
    """One server, one model."""

    def __init__(self, base_url: str, key: str | None) -> None:
        import httpx

        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(30, read=None)
        self._http = httpx.Client(base_url=base_url, headers=headers, timeout=timeout, trust_env=False)

    def first_model(self) -> str:
        import httpx

        try:
            answer = self._http.get("/v1/models")
            _raise_for(answer.status_code, answer.text)
            return str(answer.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise PDServeError(f"{self._http.base_url} does not answer: {error}") from None

    def stream(self, body: dict[str, Any], answer: Answer) -> Iterator[str]:
        import httpx

        asked = {**body, "stream": True, "stream_options": {"include_usage": True}, "include_phases": True}
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=asked) as response:
                if response.is_error:
                    _raise_for(response.status_code, response.read().decode(errors="replace"))
                yield from deltas(response.iter_lines(), answer)
        except httpx.HTTPError as error:
            raise PDServeError(f"the connection failed: {error}") from None


def _raise_for(status: int, text: str) -> None:
    if status < 400:
        return
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = text[:200]
    raise PDServeError(f"the server refuses ({status}): {message}")


def _say(client: Client, body: dict[str, Any]) -> str:
    """Print one answer and its phase line; returns the text."""
    answer = Answer()
    for text in client.stream(body, answer):
        sys.stdout.write(text)
        sys.stdout.flush()
    print()
    is_terminal = sys.stderr.isatty()
    print(f"\x1b[2m{phase_line(answer)}\x1b[0m" if is_terminal else phase_line(answer), file=sys.stderr)
    return "".join(answer.text)


def _questions() -> Iterator[str]:
    """Lines typed on a terminal until end of file; in a pipe, all of it as one."""
    if not sys.stdin.isatty():
        text = sys.stdin.read().strip()
        if not text:
            raise ConfigError("there is no prompt; give one as an argument or on standard input")
        yield text
        return
    print("Type a message; an empty line or Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            return
        if not text:
            return
        yield text


def _key(path: Path | None) -> str | None:
    from pdserve.options import read_api_keys

    return None if path is None else read_api_keys(str(path))[0]


def chat(
    prompt: Annotated[str | None, typer.Argument(help="what to say; without it, a conversation")] = None,
    base_url: BaseUrl = None,
    port: Annotated[int | None, typer.Option(help="the server here that serves on this port")] = None,
    model: Annotated[str | None, typer.Option(help="model to ask (default: the server's)")] = None,
    system: Annotated[str | None, typer.Option(help="system message")] = None,
    max_tokens: Annotated[int, typer.Option(help="longest answer")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="for temperatures above 0")] = None,
    api_key_file: ApiKeyFile = None,
) -> None:
    """Talk to a running server; the line below each answer says where its time went.

    Example: pdserve chat "Why is the sky blue?"
    """
    from pdserve.runtime import the_only_record

    client = Client(base_url or the_only_record(runtime_folder(), port).base_url, _key(api_key_file))
    messages = [{"role": "system", "content": system}] if system else []
    body: dict[str, Any] = {
        "model": model or client.first_model(),
        "max_tokens": max_tokens,
        "temperature": temperature,
    }
    if seed is not None:
        body["seed"] = seed
    for question in (prompt,) if prompt is not None else _questions():
        asked = [*messages, {"role": "user", "content": question}]
        messages = [*asked, {"role": "assistant", "content": _say(client, {**body, "messages": asked})}]
