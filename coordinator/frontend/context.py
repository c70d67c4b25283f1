"""Whether a prompt and its output fit, and the error that says why not.

Owns the arithmetic of the context limit. Invariant: prompt plus output never exceeds the limit.
"""

from __future__ import annotations

from coordinator.frontend.tokenizer import TextTokenizer
from pdserve.errors import RequestError


def too_long(*, limit: int, num_prompt: str, param: str, max_tokens: int | None = None) -> RequestError:
    """`num_prompt` is a count of tokens, perhaps with a word before it."""
    if max_tokens is None:
        counts = f"the prompt has {num_prompt}, which leaves none for the answer"
    else:
        counts = f"the prompt has {num_prompt} and {max_tokens} more are asked for"
    message = f"At most {limit} tokens fit, prompt and answer together: {counts}"
    return RequestError(message, param=param, code="context_length_exceeded")


def refuse_too_long(tokenizer: TextTokenizer, text: str, limit: int, param: str) -> None:
    """Refuse what cannot fit before all of it is tokenized."""
    if least := tokenizer.least_tokens(text, limit=limit):
        raise too_long(limit=limit, num_prompt=f"at least {least} ({len(text)} characters)", param=param)


def fit(*, limit: int, num_prompt: int, max_tokens: int | None, prompt_param: str, tokens_param: str) -> int:
    """The number of tokens to generate at most: what was asked for, or what is left."""
    left = limit - num_prompt
    if left < 1:
        raise too_long(limit=limit, num_prompt=str(num_prompt), param=prompt_param, max_tokens=max_tokens)
    if max_tokens is None:
        return left
    if max_tokens > left:
        raise too_long(limit=limit, num_prompt=str(num_prompt), param=tokens_param, max_tokens=max_tokens)
    return max_tokens
