"""Messages to token ids: the model's chat template, rendered in Jinja2's immutable sandbox.

Owns rendering, its time limit, and the wall between control tokens the template writes and the same text inside a
message. Invariant: the control tokens of the result are exactly those the template wrote; where no message spells
one, the ids are those of encoding the rendered text as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from coordinator.frontend.context import refuse_too_long
from coordinator.frontend.deadline import TimeLimitError, within
from coordinator.frontend.tokenizer import TextTokenizer, control_pattern
from pdserve.errors import ModelError, RequestError

Message = Mapping[str, str]  # role, content, and perhaps name and tool_call_id
_MARKS = range(0xE000, 0xF8FF)  # private use: no text means anything by them


class ChatTemplate:
    def __init__(self, source: str | None, *, variables: Mapping[str, str], tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._variables = dict(variables)
        controls = tuple(control for control in tokenizer.controls if len(control.text) > 1)  # else there is no middle
        self._controls = {control.text: control for control in controls}
        self._pattern = control_pattern(controls)
        self._template = None if source is None else _compile(source)

    def encode(self, messages: Sequence[Message], *, limit: int, limit_s: float) -> list[int]:
        """The prompt's ids.

        Raises RequestError when the template refuses, fails or takes longer than `limit_s`, or when what it wrote
        surely has more tokens than `limit`; what only turns out to have more is returned.
        """
        guarded, mark = self._guard(messages)
        text = self.render(guarded, limit_s=limit_s)
        refuse_too_long(self._tokenizer, text, limit, "messages")
        return self._tokenizer.encode(text) if mark is None else self._encode_marked(text, mark)

    def render(self, messages: Sequence[Message], *, limit_s: float) -> str:
        template = self._template
        if template is None:
            raise RequestError("This model has no chat template", param="messages", code="no_chat_template")
        fields: dict[str, Any] = {**self._variables, "messages": [dict(message) for message in messages], "tools": None}
        fields["documents"] = None
        try:
            return within(limit_s, lambda: template.render(**fields, add_generation_prompt=True))
        except TimeLimitError:
            why = f"it took longer than {limit_s:g} s"
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            why = str(error) or "it failed"
        except (RecursionError, OverflowError, MemoryError, ArithmeticError):
            why = "it needs too much"
        raise RequestError(f"The chat template refused: {why}", param="messages", code="chat_template_error")

    def _guard(self, messages: Sequence[Message]) -> tuple[Sequence[Message], str | None]:
        """Messages in which no control token can be found, and the mark that broke them up; None: none had to be."""
        if self._pattern is None:
            return messages, None
        texts = [text for message in messages for text in message.values()]
        if not any(self._pattern.search(text) or self._open_end(text) for text in texts):
            return messages, None
        mark = next(chr(code) for code in _MARKS if not any(chr(code) in text for text in texts))
        return [{key: self._break_up(text, mark) for key, text in message.items()} for message in messages], mark

    def _break_up(self, text: str, mark: str) -> str:
        assert self._pattern is not None
        broken = text
        while self._pattern.search(broken):  # again, should one control token lie inside another
            broken = self._pattern.sub(lambda match: match[0][0] + mark + match[0][1:], broken)
        size = self._open_end(broken)
        body = broken.rstrip()
        return broken if not size else body[: len(body) - size + 1] + mark + broken[len(body) - size + 1 :]

    def _open_end(self, text: str) -> int:
        """Length of the text's end (white space aside) that the template could complete to a control token."""
        body = text.rstrip()
        longest = 0
        for control in self._controls:
            for size in range(min(len(control) - 1, len(body)), max(longest, 1), -1):
                if body.endswith(control[:size]):
                    longest = size
                    break
        return longest

    def _encode_marked(self, text: str, mark: str) -> list[int]:
        assert self._pattern is not None
        ids: list[int] = []
        begin, strips_left = 0, False
        for match in self._pattern.finditer(text):
            control = self._controls[match[0]]
            if control.is_single_word and not _stands_alone(text, match):
                continue
            ids += self._encode_between(text[begin : match.start()], mark, begin, (strips_left, control.swallows_left))
            ids.append(control.id)
            begin, strips_left = match.end(), control.swallows_right
        return ids + self._encode_between(text[begin:], mark, begin, (strips_left, False))

    def _encode_between(self, text: str, mark: str, begin: int, strips: tuple[bool, bool]) -> list[int]:
        text = text.lstrip() if strips[0] else text
        text = text.rstrip() if strips[1] else text
        plain = text.replace(mark, "")
        return self._tokenizer.encode_plain(plain, is_first=begin == 0) if plain else []


def load_chat_template(model_dir: Path, tokenizer: TextTokenizer) -> ChatTemplate:
    """From chat_template.jinja or tokenizer_config.json; a folder without one still serves completions."""
    config = _read_object(model_dir / "tokenizer_config.json")
    special = _read_object(model_dir / "special_tokens_map.json") | config
    variables = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = special.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            variables[name] = text
    path = model_dir / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = {item.get("name"): item.get("template") for item in source}.get("default")
    try:
        return ChatTemplate(source, variables=variables, tokenizer=tokenizer)
    except jinja2.TemplateError as error:
        raise ModelError(f"{model_dir}: the chat template is not valid Jinja: {error}") from None


def _read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError:
        raise ModelError(f"{path} is not JSON") from None
    return found if isinstance(found, dict) else {}


def _stands_alone(text: str, match: Any) -> bool:
    before, after = text[: match.start()][-1:], text[match.end() :][:1]
    return not any(char.isalnum() or char == "_" for char in (before, after) if char)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; for serving it is its contents."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _raise(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
