"""Log probabilities in the two shapes OpenAI publishes: a list of objects for chat, parallel lists for completions.

Owns how a token is written where it is no whole text, and what stands for minus infinity. Invariant: every number is
finite and every token counted in usage has one entry.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from coordinator.frontend.choice import TokenInfo
from coordinator.frontend.detokenizer import TokenTable

FLOOR = -9999.0  # stands for a token that cannot be sampled


def chat_logprobs(tokens: Sequence[TokenInfo], table: TokenTable, num_top: int) -> dict[str, Any]:
    entries = []
    for info in tokens:
        entry = _entry(info.token, info.logprob, table)
        entry["top_logprobs"] = [_entry(token, logprob, table) for token, logprob in info.top[:num_top]]
        entries.append(entry)
    return {"content": entries, "refusal": None}


def completion_logprobs(tokens: Sequence[TokenInfo], table: TokenTable, num_top: int) -> dict[str, Any]:
    """`top_logprobs` holds the sampled token too, so it may have one entry more than was asked for."""
    return {
        "tokens": [spelled(info.token, table) for info in tokens],
        "token_logprobs": [finite(info.logprob) for info in tokens],
        "top_logprobs": [_alternatives(info, table, num_top) for info in tokens] if num_top else None,
        "text_offset": [info.offset for info in tokens],
    }


def spelled(token: int, table: TokenTable) -> str:
    """The token's text; bytes that are no text by themselves are written as `bytes:\\xf0\\x9f`."""
    raw = table.bytes_of(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def finite(logprob: float | None) -> float:
    return FLOOR if logprob is None or not math.isfinite(logprob) else logprob


def _entry(token: int, logprob: float | None, table: TokenTable) -> dict[str, Any]:
    return {"token": spelled(token, table), "logprob": finite(logprob), "bytes": list(table.bytes_of(token))}


def _alternatives(info: TokenInfo, table: TokenTable, num_top: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for token, logprob in (*info.top[:num_top], (info.token, info.logprob)):
        found.setdefault(spelled(token, table), finite(logprob))  # two ids may spell the same: the likelier stands
    return found
