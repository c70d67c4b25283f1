"""Model folders of a few hundred bytes, written without torch: a config and zeros for weights."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 12,
    "vocab_size": 10,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def shapes(config: Mapping[str, object]) -> Iterator[tuple[str, list[int]]]:
    hidden, inner, vocab = (int(config[key]) for key in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, kv_heads = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
    head_dim = int(config.get("head_dim") or hidden // heads)
    is_qwen2, is_qwen3 = (config["architectures"] == [f"{name}ForCausalLM"] for name in ("Qwen2", "Qwen3"))
    has_bias = is_qwen2 or bool(config.get("attention_bias"))
    yield "model.embed_tokens.weight", [vocab, hidden]
    yield "model.norm.weight", [hidden]
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", [vocab, hidden]
    for layer in range(int(config["num_hidden_layers"])):
        at = f"model.layers.{layer}."
        yield f"{at}input_layernorm.weight", [hidden]
        yield f"{at}post_attention_layernorm.weight", [hidden]
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            yield f"{at}self_attn.{name}_proj.weight", [rows * head_dim, hidden]
            if has_bias:
                yield f"{at}self_attn.{name}_proj.bias", [rows * head_dim]
        yield f"{at}self_attn.o_proj.weight", [hidden, heads * head_dim]
        if has_bias and not is_qwen2:
            yield f"{at}self_attn.o_proj.bias", [hidden]
        for name, shape in (("gate", [inner, hidden]), ("up", [inner, hidden]), ("down", [hidden, inner])):
            yield f"{at}mlp.{name}_proj.weight", shape
        if is_qwen3:
            yield f"{at}self_attn.q_norm.weight", [head_dim]
            yield f"{at}self_attn.k_norm.weight", [head_dim]


def safetensors(tensors: Mapping[str, list[int]], fill: int = 0) -> bytes:
    header: dict[str, object] = {}
    at = 0
    for name, shape in tensors.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes([fill]) * at


def write_folder(
    directory: Path, *, files: Mapping[str, object] | None = None, fill: int = 0, **changes: object
) -> Path:
    """A folder that can be served; `changes` go into config.json (None removes a key), `files` beside it."""
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes(safetensors(dict(shapes(config)), fill))
    for name, content in (files or {}).items():
        (directory / name).write_text(json.dumps(content))
    return directory
