"""What a model is, read from its folder: shapes, rotary embedding, limits, end tokens and a fingerprint.

Owns the reading of config.json, generation_config.json and the tokenizer files' special tokens; holds no weights
and needs no torch. Invariant: a field of config.json that would change the result is honoured or refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pdserve.errors import ModelError
from pdserve.layout import KVLayout
from pdserve.model.checkpoint import Checkpoint, open_checkpoint, read_json

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_NOT_IDENTITY = ("transformers_version", "_name_or_path", "_attn_implementation", "use_cache", "torch_dtype", "dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary embedding (Su et al., 2021); `llama3` lowers only the low frequencies, `linear` all of them."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3 only, as the next two
    high_freq_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int  # rows of the embedding
    rms_eps: float
    rope: Rope
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None
    max_positions: int  # longest context served: the trained one, or the sliding window where that is shorter
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # sorted union of model config, generation config and tokenizer
    fingerprint: str  # of config and weights, equal on every machine and after a restart

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def kv_layout(self, *, dtype: str, block_size: int, weights: str = "full") -> KVLayout:
        return KVLayout(
            model=self.fingerprint,
            dtype=dtype,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            weights=weights,
        )

    def tensor_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every tensor a checkpoint of this model must hold, with its shape."""
        hidden, inner = self.hidden_size, self.intermediate_size
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        yield "model.norm.weight", (hidden,)
        if not self.tied_embeddings:
            yield "lm_head.weight", (self.vocab_size, hidden)
        linears = (
            ("self_attn.q_proj", query, hidden, self.qkv_bias),
            ("self_attn.k_proj", key, hidden, self.qkv_bias),
            ("self_attn.v_proj", key, hidden, self.qkv_bias),
            ("self_attn.o_proj", hidden, query, self.output_bias),
            ("mlp.gate_proj", inner, hidden, self.mlp_bias),
            ("mlp.up_proj", inner, hidden, self.mlp_bias),
            ("mlp.down_proj", hidden, inner, self.mlp_bias),
        )
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            for norm in ("input_layernorm", "post_attention_layernorm"):
                yield f"{prefix}{norm}.weight", (hidden,)
            for name, rows, columns, has_bias in linears:
                yield f"{prefix}{name}.weight", (rows, columns)
                if has_bias:
                    yield f"{prefix}{name}.bias", (rows,)
            if self.qk_norm:
                yield f"{prefix}self_attn.q_norm.weight", (self.head_dim,)
                yield f"{prefix}self_attn.k_norm.weight", (self.head_dim,)


def read_spec(directory: Path) -> ModelSpec:
    """The model in a Hugging Face folder; ModelError in one line when it cannot be served."""
    if not directory.is_dir():
        raise ModelError(f"{directory} is not a folder")
    config = read_json(directory / "config.json")
    try:
        spec = _from_config(directory, config, open_checkpoint(directory))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{directory / 'config.json'} is malformed: {type(error).__name__} {error}") from None
    return spec


def _from_config(directory: Path, config: dict[str, Any], checkpoint: Checkpoint) -> ModelSpec:
    architecture = _architecture(directory, config)
    is_qwen2, is_qwen3 = architecture == "Qwen2ForCausalLM", architecture == "Qwen3ForCausalLM"
    num_heads = int(config["num_attention_heads"])
    is_llama = architecture == "LlamaForCausalLM"
    has_attention_bias = bool(config.get("attention_bias", False)) and (is_llama or is_qwen3)
    window = _sliding_window(config, architecture)
    positions = int(config["max_position_embeddings"])
    spec = ModelSpec(
        architecture=architecture,
        hidden_size=int(config["hidden_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=int(config.get("head_dim") or (128 if is_qwen3 else int(config["hidden_size"]) // num_heads)),
        intermediate_size=int(config["intermediate_size"]),
        vocab_size=int(config["vocab_size"]),
        rms_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config, positions),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=is_qwen2 or has_attention_bias,
        output_bias=has_attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and is_llama,
        qk_norm=is_qwen3,
        sliding_window=window,
        max_positions=min(positions, window) if window else positions,
        bos_token_id=_ids(config.get("bos_token_id"))[0] if _ids(config.get("bos_token_id")) else None,
        eos_token_ids=_eos_token_ids(directory, config),
        fingerprint=_fingerprint(config, checkpoint),
    )
    _check(directory, spec)
    checkpoint.require(spec.tensor_shapes())
    return spec


def _architecture(directory: Path, config: dict[str, Any]) -> str:
    names = config.get("architectures") or []
    if not names or names[0] not in ARCHITECTURES:
        raise ModelError(
            f"{directory}: architecture {names[0] if names else 'unknown'} is not served; "
            f"served are {', '.join(ARCHITECTURES)}"
        )
    if config.get("quantization_config"):
        raise ModelError(f"{directory}: quantized weights are not served")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{directory}: activation {config['hidden_act']} is not served, only silu")
    return str(names[0])


def _sliding_window(config: dict[str, Any], architecture: str) -> int | None:
    """The attention window in tokens, if any layer has one; contexts up to it are full attention in every layer."""
    window = config.get("sliding_window", 4096)  # the default of the three architectures that know it
    if not window or architecture == "LlamaForCausalLM":
        return None
    if architecture == "MistralForCausalLM":
        return int(window)
    if not config.get("use_sliding_window", False):
        return None
    layer_types = config.get("layer_types")
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    if layer_types is None and int(config.get("max_window_layers", 28)) >= int(config["num_hidden_layers"]):
        return None
    return int(window)


def _rope(config: dict[str, Any], max_positions: int) -> Rope:
    """`rope_parameters` holds everything in newer files; older ones have `rope_theta` and `rope_scaling`."""
    fields: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        fields.update(config.get(key) or {})
    if any(isinstance(value, dict) for value in fields.values()):
        raise ModelError("a rotary embedding that differs between layers is not served")
    theta = float(fields.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = fields.get("rope_type") or fields.get("type") or "default"
    partial = float(fields.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    if partial != 1.0:
        raise ModelError(f"a partial rotary embedding (factor {partial}) is not served")
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind="linear", factor=float(fields["factor"]))
    if kind == "llama3":
        return Rope(
            theta=theta,
            kind="llama3",
            factor=float(fields["factor"]),
            low_freq_factor=float(fields["low_freq_factor"]),
            high_freq_factor=float(fields["high_freq_factor"]),
            original_positions=int(fields.get("original_max_position_embeddings") or max_positions),
        )
    raise ModelError(f"rope scaling {kind!r} is not served; served are default, linear and llama3")


def _eos_token_ids(directory: Path, config: dict[str, Any]) -> tuple[int, ...]:
    found = set(_ids(config.get("eos_token_id")))
    if (directory / "generation_config.json").is_file():
        found.update(_ids(read_json(directory / "generation_config.json").get("eos_token_id")))
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (directory / name).is_file():
            found.update(_token_ids(directory, read_json(directory / name).get("eos_token")))
    return tuple(sorted(found))


def _ids(value: object) -> list[int]:
    if value is None:
        return []
    return [int(item) for item in value] if isinstance(value, list) else [int(str(value))]


def _token_ids(directory: Path, token: object) -> list[int]:
    """The id of a token's text, as tokenizer.json knows it."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str) or not (directory / "tokenizer.json").is_file():
        return []
    tokenizer = read_json(directory / "tokenizer.json")
    added = [int(item["id"]) for item in tokenizer.get("added_tokens") or () if item["content"] == text]
    if added:
        return added
    vocab = (tokenizer.get("model") or {}).get("vocab")
    return [int(vocab[text])] if isinstance(vocab, dict) and text in vocab else []


def _fingerprint(config: dict[str, Any], checkpoint: Checkpoint) -> str:
    identity = {key: value for key, value in config.items() if key not in _NOT_IDENTITY}
    hasher = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16)
    hasher.update(checkpoint.digest())
    return hasher.hexdigest()


def _check(directory: Path, spec: ModelSpec) -> None:
    sizes = (spec.hidden_size, spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size)
    if min(*sizes, spec.intermediate_size, spec.max_positions) < 1:
        raise ModelError(f"{directory / 'config.json'}: every size must be at least 1")
    if spec.num_heads % spec.num_kv_heads or spec.head_dim % 2:
        raise ModelError(
            f"{directory / 'config.json'}: {spec.num_heads} query heads cannot share {spec.num_kv_heads} key heads "
            f"of size {spec.head_dim}"
        )
    if any(not 0 <= token < spec.vocab_size for token in spec.eos_token_ids):
        raise ModelError(f"{directory}: end tokens {list(spec.eos_token_ids)} are not all below {spec.vocab_size}")
