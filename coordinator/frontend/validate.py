"""A client's JSON to a `Parsed` request: every rule about the fields themselves.

Owns names, types, ranges and defaults; what needs the tokenizer (lengths, the context) is `prepare.py`'s. Invariant:
a `Parsed` value breaks no rule that can be checked without tokenizing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from coordinator.frontend.fields import Fields, check_number, is_text, refuse
from coordinator.frontend.prompts import Message, Prompt, read_messages, read_prompts
from coordinator.frontend.unsupported import refuse_unsupported
from pdserve.errors import NotFoundError, RequestError
from pdserve.request import Sampling

Kind = Literal["chat", "completion"]
MAX_N = 8
MAX_STOPS, MAX_STOP_CHARS = 4, 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_TOP_LOGPROBS, MAX_LOGPROBS = 20, 5  # chat, completions
MAX_SALT_CHARS = 256
_MAX_COUNT = 2**53  # any integer a JSON client can mean
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What requests are checked against."""

    served_names: tuple[str, ...]
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    max_choices: int = 2**31  # more than this could never wait together


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    kind: Kind
    model: str
    prompts: tuple[Prompt, ...]  # completions
    messages: tuple[Message, ...]  # chat
    sampling: Sampling  # max_tokens is still 1, and the seed 0
    seed: int | None  # None: to be drawn
    max_tokens: int | None  # None: what the context leaves
    max_tokens_name: str  # the field it came from, for messages
    stop: tuple[str, ...]
    is_stream: bool
    includes_usage: bool
    includes_phases: bool
    returns_token_ids: bool
    priority: int
    salt: str
    ignored: tuple[str, ...]  # names of unknown fields, and of known ones that nothing heeds

    @property
    def num_choices(self) -> int:
        return max(len(self.prompts), 1) * self.sampling.n


def parse(kind: Kind, body: dict[str, Any], model: Model) -> Parsed:
    """Raises RequestError naming the first field that is wrong."""
    fields = Fields(body)
    name = read_model(fields, model)
    refuse_unsupported(fields)
    is_chat = kind == "chat"
    prompts = () if is_chat else read_prompts(fields, vocab_size=model.vocab_size, max_model_len=model.max_model_len)
    messages = read_messages(fields, max_model_len=model.max_model_len) if is_chat else ()
    max_tokens_name, max_tokens = _max_tokens(fields)
    sampling = _sampling(fields, kind, model)
    if max_tokens is not None and sampling.min_tokens > max_tokens:
        message = f"'min_tokens' is {sampling.min_tokens}, more than '{max_tokens_name}', which is {max_tokens}"
        raise RequestError(message, param="min_tokens", code="invalid_value")
    _check_choices(max(len(prompts), 1), sampling.n, model.max_choices)
    is_stream = fields.boolean("stream")
    includes_usage = _stream_options(fields, is_stream)
    has_slo = _check_slo(fields)
    return Parsed(
        kind=kind,
        model=name,
        prompts=prompts,
        messages=messages,
        sampling=sampling,
        seed=_seed(fields),
        max_tokens=max_tokens,
        max_tokens_name=max_tokens_name,
        stop=_stop(fields),
        is_stream=is_stream,
        includes_usage=includes_usage,
        includes_phases=fields.boolean("include_phases"),
        returns_token_ids=fields.boolean("return_token_ids"),
        priority=fields.integer("priority", -(2**31), 2**31 - 1) or 0,
        salt=fields.text("cache_salt", MAX_SALT_CHARS) or "",
        ignored=fields.unasked() + (("slo",) if has_slo else ()),
    )


def _check_choices(num_prompts: int, n: int, most: int) -> None:
    if num_prompts * n > most:
        asked = f"{num_prompts} prompts" if n == 1 else f"{num_prompts} prompts with 'n' {n}"
        message = f"{asked} are {num_prompts * n} choices; this server queues at most {most} (--max-queued-requests)"
        raise RequestError(message, param="n" if num_prompts == 1 else "prompt", code="invalid_value")


def read_model(fields: Fields, model: Model, *, is_required: bool = True) -> str:
    name = fields.value("model")
    if name is None:
        if not is_required:
            return model.served_names[0]
        raise RequestError("'model' is required", param="model", code="missing_required_parameter")
    if not isinstance(name, str):
        raise refuse("model", "a string", name)
    if name not in model.served_names:
        raise unknown_model(name, model)
    return name


def unknown_model(name: str, model: Model) -> NotFoundError:
    served = ", ".join(model.served_names)
    shown = name.encode(errors="replace").decode()[:100]
    message = f"The model '{shown}' does not exist here; served is {served}"
    return NotFoundError(message, param="model", code="model_not_found")


def _max_tokens(fields: Fields) -> tuple[str, int | None]:
    new = fields.integer("max_completion_tokens", 1, _MAX_COUNT)
    old = fields.integer("max_tokens", 1, _MAX_COUNT)
    if new is not None and old is not None and new != old:
        message = f"'max_tokens' is {old} but 'max_completion_tokens' is {new}; give one of them"
        raise RequestError(message, param="max_tokens", code="invalid_value")
    return ("max_tokens", old) if new is None else ("max_completion_tokens", new)


def _sampling(fields: Fields, kind: Kind, model: Model) -> Sampling:
    top_k = fields.integer("top_k", -1, _MAX_COUNT) or 0
    return Sampling(
        max_tokens=1,
        temperature=fields.number("temperature", 0, 2, 1.0),
        top_p=fields.number("top_p", 0, 1, 1.0),
        top_k=top_k if 0 < top_k < model.vocab_size else 0,
        min_p=fields.number("min_p", 0, 1, 0.0),
        n=fields.integer("n", 1, MAX_N) or 1,
        presence_penalty=fields.number("presence_penalty", -2, 2, 0.0),
        frequency_penalty=fields.number("frequency_penalty", -2, 2, 0.0),
        repetition_penalty=fields.number("repetition_penalty", 0.01, 10, 1.0),
        logit_bias=_logit_bias(fields, model.vocab_size),
        num_logprobs=_chat_logprobs(fields) if kind == "chat" else _completion_logprobs(fields),
        min_tokens=fields.integer("min_tokens", 0, _MAX_COUNT) or 0,
        ignore_eos=fields.boolean("ignore_eos"),
        eos_token_ids=model.eos_token_ids,
        stop_token_ids=fields.token_ids("stop_token_ids", vocab_size=model.vocab_size, max_items=MAX_STOP_TOKEN_IDS),
    )


def _seed(fields: Fields) -> int | None:
    seed = fields.integer("seed", -(2**63), 2**64 - 1)
    return None if seed is None else seed % 2**64


def _chat_logprobs(fields: Fields) -> int:
    is_wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top is not None and not is_wanted:
        raise RequestError("'top_logprobs' needs 'logprobs': true", param="top_logprobs", code="invalid_value")
    return (top or 0) if is_wanted else -1


def _completion_logprobs(fields: Fields) -> int:
    if fields.value("top_logprobs") is not None:
        raise RequestError(
            "'top_logprobs' is for chat; completions take 'logprobs': n", param="top_logprobs", code="invalid_value"
        )
    count = fields.integer("logprobs", 0, MAX_LOGPROBS)
    return -1 if count is None else count


def _logit_bias(fields: Fields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    value = fields.value("logit_bias")
    if value is None:
        return ()
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIAS:
        raise refuse("logit_bias", f"an object of at most {MAX_LOGIT_BIAS} token ids", value)
    for token in value:
        if not _TOKEN_ID.fullmatch(token) or int(token) >= vocab_size:
            raise refuse("logit_bias", f"keyed by token ids from 0 to {vocab_size - 1}", token)
    return tuple((int(token), check_number("logit_bias", bias, -100, 100)) for token, bias in value.items())


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.value("stop")
    stops = [value] if isinstance(value, str) else value if value is not None else []
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise refuse("stop", f"a string or a list of at most {MAX_STOPS} strings", value)
    for stop in stops:
        if not is_text(stop) or not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise refuse("stop", f"strings of 1 to {MAX_STOP_CHARS} characters", stop)
    return tuple(dict.fromkeys(stops))


def _stream_options(fields: Fields, is_stream: bool) -> bool:
    value = fields.value("stream_options")
    if value is None:
        return False
    if not isinstance(value, dict):
        raise refuse("stream_options", "an object", value)
    if not is_stream:
        raise RequestError("'stream_options' needs 'stream': true", param="stream_options", code="invalid_value")
    options = Fields(value)
    if options.boolean("continuous_usage_stats"):
        message = "'stream_options.continuous_usage_stats' is not supported"
        raise RequestError(message, param="stream_options", code="unsupported_parameter")
    return options.boolean("include_usage")


def _check_slo(fields: Fields) -> bool:
    value = fields.value("slo")
    if value is None:
        return False
    if not isinstance(value, dict) or not value.keys() <= {"ttft_ms", "tpot_ms"}:
        raise refuse("slo", "an object of ttft_ms and tpot_ms", value)
    for name, bound in value.items():
        if bound is not None:
            check_number(f"slo.{name}", bound, 0.001, 1e9)
    return True
