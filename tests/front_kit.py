"""What front end tests share: small tokenizers, a core in memory, and a raw ASGI client."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from coordinator.frontend.app import build_app
from coordinator.frontend.front import Front
from pdserve.config import FrontConfig, HttpOptions, TimeoutOptions
from pdserve.messages import (
    Abandon,
    Ended,
    Output,
    Probe,
    ProbeReply,
    Query,
    QueryReply,
    SampleEnded,
    StopFound,
    Submit,
    TokenText,
)

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = 2
TEXT = [
    "hello world, the quick brown fox jumps over the lazy dog. " * 3,
    "system user assistant\nYou are helpful",
    "삼겹살",
]


def in_loop(test: Callable[..., Any]) -> Callable[..., None]:
    """A test that is a coroutine, run in a loop of its own."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


@functools.cache
def _byte_level_text() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer.to_str()


def byte_level() -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE whose first ids are the special tokens 0, 1 and 2."""
    return json.loads(_byte_level_text())


def sentencepiece(*, prepend: str | None = None) -> dict[str, Any]:
    """tokenizer.json as Llama 2 has it: spaces as U+2581, bytes as <0x..>, <s> put first.

    `prepend`: mark words with a Metaspace of that scheme instead of a normalizer.
    """
    words = ["\u2581hello", "\u2581world", "hello", "world", "\u2581", "<0x0A>", "a", "b", "<", ">", "/", "s", "[", "]"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for piece in [*words, *(f"<0x{byte:02X}>" for byte in range(256))]:
        vocab.setdefault(piece, len(vocab))
    merges: list[list[str]] = []
    for word in words[:4]:
        for end in range(1, len(word)):
            left, right = word[:end], word[end]
            for piece in (left, right, left + right):
                vocab.setdefault(piece, len(vocab))
            if [left, right] not in merges:
                merges.append([left, right])
    added = [
        {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for i, text in enumerate(("<unk>", "<s>", "</s>"))
    ]  # fmt: skip
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": prepend, "split": False}
    spaces = [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    ]
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None if prepend else {"type": "Sequence", "normalizers": spaces},
        "pre_tokenizer": metaspace if prepend else None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "vocab": vocab, "merges": merges,
        },
    }  # fmt: skip


def model_folder(
    folder: Path, definition: dict[str, Any] | None = None, template: str | None = CHATML, **config: Any
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(byte_level() if definition is None else definition))
    fields = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def front_config(folder: Path, **changes: Any) -> FrontConfig:
    """Changes of a flag of the front ends or of a field, by name; `api_keys` are written into a file."""
    if "api_keys" in changes:
        keys = folder / "keys"
        keys.write_text("\n".join(changes.pop("api_keys")), encoding="utf-8")
        changes["api_key_file"] = str(keys)
    flags = {name: changes.pop(name) for name in list(changes) if name in HttpOptions.__slots__}
    fields: dict[str, Any] = {
        "name": "front-0",
        "http": HttpOptions(**flags),
        "timeouts": TimeoutOptions(),
        "core_endpoint": "",
        "listen_fd": -1,
        "model_dir": str(folder),
        "served_names": ("tiny",),
        "vocab_size": 512,
        "eos_token_ids": (EOS,),
        "max_model_len": 128,
        "max_choices": 256,
        "seed": 7,
        "drain_s": 30.0,
    }
    return FrontConfig(**(fields | changes))


def token(number: int, logprob: float | None = None, top: tuple[tuple[int, float], ...] = ()) -> TokenText:
    return TokenText(token=number, logprob=logprob, top=top)


def ended(ticket: int, outcome: str = "finished", **changes: Any) -> Ended:
    fields: dict[str, Any] = {
        "ticket": ticket,
        "outcome": outcome,
        "message": "",
        "status": 0,
        "code": "",
        "retry_after_s": 0.0,
        "mode": "disaggregated",
        "prefill_worker": "prefill-0",
        "decode_worker": "decode-0",
        "cached_tokens": 0,
        "attempts": 1,
        "phases_ns": (("queue", 1_000_000), ("prefill", 2_500_000)),
        "transfer_ns": 500_000,
        "transfer_overlap": 0.75,
    }
    return Ended(**(fields | changes))


class FakeCore:
    """Answers in memory. `script` is called with each Submit and may use `say`, `output`, `end`."""

    def __init__(self, script: Callable[[FakeCore, Submit], None] | None = None) -> None:
        self.script = script
        self.submits: list[Submit] = []
        self.abandoned: list[Abandon] = []
        self.stops: list[StopFound] = []
        self.on_stop: Callable[[StopFound], None] = lambda message: None
        self.arrived = asyncio.Event()
        self.was_abandoned = asyncio.Event()
        self.is_connected = True
        self.is_full = False
        self.is_ready = True
        self.answers_probes = True
        self.pools: dict[str, Any] = {}
        self.metrics = "# TYPE pdserve_requests_started_total counter\npdserve_requests_started_total 3\n"

    def connect(self, on_message: Callable[[Any], None], on_lost: Callable[[], None]) -> FakeCore:
        self.say, self.lose = on_message, on_lost
        return self

    def start(self) -> None: ...

    def close(self) -> None: ...

    def send(self, message: Any) -> bool:
        if self.is_full:
            return False
        match message:
            case Submit():
                self.submits.append(message)
                self.arrived.set()
                if self.script is not None:
                    asyncio.get_running_loop().call_soon(self.script, self, message)
            case Abandon():
                self.abandoned.append(message)
                self.was_abandoned.set()
            case StopFound():
                self.stops.append(message)
                self.on_stop(message)
            case Probe() if self.answers_probes:
                detail = json.dumps({"pools": {"prefill": "1 ready", "decode": "1 ready"}})
                reply = ProbeReply(nonce=message.nonce, is_ready=self.is_ready, detail=detail)
                asyncio.get_running_loop().call_soon(self.say, reply)
            case Query():
                body = self.metrics if message.what == "metrics" else json.dumps(self.pools)
                asyncio.get_running_loop().call_soon(self.say, QueryReply(nonce=message.nonce, body=body))
        return True

    def output(self, ticket: int, tokens: list[int] | list[TokenText], *, sample: int = 0, first: int = 0) -> None:
        texts = tuple(token(item) if isinstance(item, int) else item for item in tokens)
        self.say(Output(ticket=ticket, sample=sample, first=first, tokens=texts, mode="disaggregated"))

    def end_sample(self, ticket: int, num_generated: int, *, sample: int = 0, reason: str = "length") -> None:
        self.say(SampleEnded(ticket=ticket, sample=sample, reason=reason, num_generated=num_generated))

    def end(self, ticket: int, outcome: str = "finished", **changes: Any) -> None:
        self.say(ended(ticket, outcome, **changes))


def replies(*tokens: int, reason: str = "length") -> Callable[[FakeCore, Submit], None]:
    """A script: every sample gives these tokens, one message each."""

    def script(core: FakeCore, submit: Submit) -> None:
        for sample in range(submit.sampling.n):
            for position, item in enumerate(tokens):
                core.output(submit.ticket, [item], sample=sample, first=position)
            core.end_sample(submit.ticket, len(tokens), sample=sample, reason=reason)
        core.end(submit.ticket)

    return script


@dataclass
class Reply:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        def refuse(name: str) -> None:
            raise ValueError(name)

        return json.loads(self.body, parse_constant=refuse)

    @property
    def error(self) -> dict[str, Any]:
        assert set(self.json) == {"error"}, self.json
        assert set(self.json["error"]) == {"message", "type", "param", "code"}
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """Parsed events of a stream, which must end with exactly one [DONE] and hold nothing but data and pings."""
        blocks = self.body.split(b"\n\n")
        assert blocks.pop() == b""
        lines = [block for block in blocks if block != b": ping"]
        assert all(line.startswith(b"data: ") and b"\n" not in line for line in lines), lines
        assert lines.pop() == b"data: [DONE]"
        assert b"data: [DONE]" not in lines
        return [json.loads(line[6:]) for line in lines]


class Call:
    """One HTTP exchange with an ASGI application, under the test's control."""

    def __init__(self, app: Any, method: str, path: str, body: bytes | dict[str, Any] = b"", **headers: str) -> None:
        raw = json.dumps(body).encode() if isinstance(body, dict) else body
        fields = {
            "content-type": "application/json",
            **{key.replace("_", "-"): value for key, value in headers.items()},
        }
        self.reply = Reply()
        self.has_bytes = asyncio.Event()
        self.blocked: asyncio.Event | None = None  # set one to make the client stop reading
        self._gone = asyncio.Event()
        self._incoming = [{"type": "http.request", "body": raw, "more_body": False}]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "headers": [(key.encode(), value.encode("utf-8")) for key, value in fields.items() if value],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
        }  # fmt: skip
        self._start = lambda: asyncio.ensure_future(app(scope, self._receive, self._send))
        self.task = self._start() if asyncio._get_running_loop() else None  # made outside a loop: `done` starts it

    def leave(self) -> None:
        self._gone.set()

    async def done(self) -> Reply:
        await (self.task or self._start())
        return self.reply

    async def _receive(self) -> dict[str, Any]:
        if self._incoming:
            return self._incoming.pop(0)
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if self._gone.is_set():
            return
        if self.blocked is not None:
            await self.blocked.wait()
        if message["type"] == "http.response.start":
            self.reply.status = message["status"]
            self.reply.headers = {key.decode(): value.decode("latin-1") for key, value in message["headers"]}
        else:
            self.reply.body += message.get("body", b"")
            self.has_bytes.set()


class Bench:
    """A front end over a fake core."""

    def __init__(self, folder: Path, script: Callable[[FakeCore, Submit], None] | None = None, **changes: Any) -> None:
        self.core = FakeCore(script)
        self.front = Front(front_config(folder, **changes), self.core.connect)
        self.app = build_app(self.front)

    def call(self, method: str, path: str, body: bytes | dict[str, Any] = b"", **headers: str) -> Call:
        return Call(self.app, method, path, body, **headers)

    async def post(self, path: str, body: bytes | dict[str, Any], **headers: str) -> Reply:
        return await self.call("POST", path, body, **headers).done()

    async def get(self, path: str, **headers: str) -> Reply:
        return await self.call("GET", path, **headers).done()

    async def complete(self, **fields: Any) -> Reply:
        return await self.post("/v1/completions", {"model": "tiny", "prompt": "hello", **fields})

    async def chat(self, **fields: Any) -> Reply:
        messages = [{"role": "user", "content": "hello"}]
        return await self.post("/v1/chat/completions", {"model": "tiny", "messages": messages, **fields})

    def ids(self, text: str) -> list[int]:
        return self.front.tokenizer.encode(text)

    def check(self) -> None:
        """Nothing is left open."""
        assert self.front.client.num_open == 0
