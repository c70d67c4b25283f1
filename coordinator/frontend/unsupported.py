"""Fields of the OpenAI interface and its relatives that are understood but not served.

Owns the table of the values that change nothing. Invariant: a field listed here either has no effect or is refused by
name; it is never silently dropped.
"""

from __future__ import annotations

import math
from typing import Any

from coordinator.frontend.fields import Fields
from pdserve.errors import RequestError

# The values (null aside) that ask for nothing.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": ("",),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
# Known and without effect on the result here: never reported as ignored.
_HARMLESS = ("user", "parallel_tool_calls")


def refuse_unsupported(fields: Fields) -> None:
    """RequestError for the first field whose value would change the result."""
    for name, harmless in _NOTHING.items():
        value = fields.value(name)
        if value is not None and not any(_is_same(value, other) for other in harmless):
            raise RequestError(f"'{name}' is not supported", param=name, code="unsupported_parameter")
    fields.mark(_HARMLESS)


def _is_same(value: Any, other: Any) -> bool:
    """Equality that tells true from 1 and takes 1.0 for 1."""
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return bool(value == other)
