"""Tiny random checkpoints of every family served, complete enough for a server to start on them.

Owns their shapes and a tokenizer of single bytes; weights are drawn from a seed. Invariant: each has what its family is
about: rope scaling, biases, head norms, untied and tied embeddings.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NUM_BYTES = 256
VOCAB = NUM_BYTES + 4  # the bytes, and control tokens
END = "<|end|>"
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": NUM_BYTES,
    "pad_token_id": NUM_BYTES + 1,
    "initializer_range": 0.2,  # large enough that text does not settle into one token
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("LlamaConfig", {"rope_parameters": _LLAMA3, "tie_word_embeddings": False}),
    "mistral": ("MistralConfig", {"head_dim": 64, "sliding_window": None, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 64, "tie_word_embeddings": True}),
}


def save_tiny(family: str, directory: Path, seed: int) -> Path:
    """The checkpoint as transformers writes it, and a tokenizer beside it; biases and norms are random too."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(seed)
    config, own = FAMILIES[family]
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**{**_SHAPE, **own}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    _save_tokenizer(directory)
    return directory


def _save_tokenizer(directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = [END, *(f"<|control_{index}|>" for index in range(1, VOCAB - NUM_BYTES))]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
