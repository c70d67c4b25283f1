"""What a client wants continued: prompts of a completion, messages of a chat.

Owns the shapes prompts come in and the roles there are. Invariant: every prompt and every list of messages returned
has something in it, and every text in them can be encoded.
"""

from __future__ import annotations

import re
from typing import Any

from coordinator.frontend.context import too_long
from coordinator.frontend.fields import Fields, check_token_ids, is_text, refuse
from pdserve.errors import RequestError

Prompt = str | tuple[int, ...]  # text, or token ids used as they are
Message = dict[str, str]  # role, content, and perhaps name and tool_call_id

MAX_PROMPTS = 64
ROLES = ("system", "developer", "user", "assistant", "tool")
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


def read_prompts(fields: Fields, *, vocab_size: int, max_model_len: int) -> tuple[Prompt, ...]:
    """A string, token ids, or a list of either: all text or all ids."""
    value = fields.value("prompt")
    if value is None:
        raise RequestError("'prompt' is required", param="prompt", code="missing_required_parameter")
    if isinstance(value, str):
        return (_text_prompt(value),)
    if not isinstance(value, list):
        raise refuse("prompt", "a string, a list of strings, token ids or lists of token ids", value)
    if not value:
        raise _empty()
    if not isinstance(value[0], (str, list)):
        return (_ids_prompt(value, vocab_size, max_model_len),)
    if len(value) > MAX_PROMPTS:
        message = f"'prompt' has {len(value)} entries; at most {MAX_PROMPTS} are served"
        raise RequestError(message, param="prompt", code="invalid_value")
    kind = type(value[0])
    if not all(type(item) is kind for item in value):
        raise RequestError("'prompt' mixes text and token ids; give one kind", param="prompt", code="invalid_value")
    if kind is str:
        return tuple(map(_text_prompt, value))
    return tuple(_ids_prompt(item, vocab_size, max_model_len) for item in value)


def read_messages(fields: Fields, *, max_model_len: int) -> tuple[Message, ...]:
    value = fields.value("messages")
    if value is None:
        raise RequestError("'messages' is required", param="messages", code="missing_required_parameter")
    if not isinstance(value, list):
        raise refuse("messages", "a list of messages", value)
    if not value:
        raise RequestError("'messages' is empty; at least one message is needed", param="messages", code="empty_array")
    if len(value) >= max_model_len:  # each takes a token at least
        raise too_long(limit=max_model_len, num_prompt=f"at least {len(value)}", param="messages")
    return tuple(_message(item, f"messages[{index}]") for index, item in enumerate(value))


def _text_prompt(value: str) -> str:
    if not value:
        raise _empty()
    if not is_text(value):
        raise RequestError("'prompt' holds text that is not Unicode", param="prompt", code="invalid_value")
    return value


def _ids_prompt(value: list[Any], vocab_size: int, max_model_len: int) -> tuple[int, ...]:
    if not value:
        raise _empty()
    if len(value) >= max_model_len:  # before looking at each of them
        raise too_long(limit=max_model_len, num_prompt=str(len(value)), param="prompt")
    return check_token_ids("prompt", value, vocab_size)


def _empty() -> RequestError:
    return RequestError("'prompt' is empty; at least one token is needed", param="prompt", code="empty_prompt")


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise refuse(where, "an object with role and content", value)
    role = value.get("role")
    if role not in ROLES:
        raise refuse(f"{where}.role", f"one of {', '.join(ROLES)}", role)
    for name in ("tool_calls", "function_call", "audio"):
        if value.get(name):
            refusal = f"'{where}.{name}' is not supported"
            raise RequestError(refusal, param=f"{where}.{name}", code="unsupported_parameter")
    message = {"role": "system" if role == "developer" else str(role)}
    message["content"] = _content(value.get("content"), f"{where}.content")
    for name in ("name", "tool_call_id"):
        text = value.get(name)
        if text is None:
            continue
        if not isinstance(text, str) or not _NAME.fullmatch(text):
            raise refuse(f"{where}.{name}", "1 to 128 letters, digits or any of _.:-", text)
        message[name] = text
    return message


def _content(value: Any, where: str) -> str:
    if isinstance(value, list):
        if not value:
            raise refuse(where, "a string or a list of text parts", value)
        return "\n".join(_part(part, f"{where}[{index}]") for index, part in enumerate(value))
    if not is_text(value):
        raise refuse(where, "a string or a list of text parts", value)
    return str(value)


def _part(value: Any, where: str) -> str:
    if not isinstance(value, dict) or value.get("type") != "text" or not is_text(value.get("text")):
        raise RequestError(f"'{where}' is not a text part; only text is served", param=where, code="invalid_value")
    return str(value["text"])
