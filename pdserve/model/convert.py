"""Turn one GGUF file into a Hugging Face folder: bf16 safetensors, tokenizer, configs, chat template.

Runs as a program of its own, `convert.py SOURCE TARGET`; `store` decides when and where. Invariant: the tokenizer
written splits text as the GGUF's own `tokenizer.ggml.pre` says, which transformers' reading of it drops.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# What a pre-tokenizer of llama.cpp is in the `tokenizers` library. SmolLM splits digits one by one, then as GPT-2.
PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        ],
    }
}


def convert(source: Path, target: Path) -> None:
    """Write the folder `target`; raises ValueError when the file's tokenizer is of a kind not known here."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    pre, template = _gguf_fields(source)
    if pre not in PRE_TOKENIZERS:
        raise ValueError(f"pre-tokenizer {pre!r} is not known")
    folder, name = str(source.parent), source.name
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=name,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(target)
    _edit_json(target / "tokenizer.json", {"pre_tokenizer": PRE_TOKENIZERS[pre]}, ())
    limit = int(model.config.max_position_embeddings)
    _edit_json(target / "tokenizer_config.json", {"model_max_length": limit}, ("is_local", "local_files_only"))
    if template:
        (target / "chat_template.jinja").write_text(template, encoding="utf-8")


def _gguf_fields(source: Path) -> tuple[str, str]:
    """The kind of pre-tokenizer and the chat template, each "" where the file has none."""
    import gguf

    fields = gguf.GGUFReader(source).fields
    pre, template = (fields.get(name) for name in ("tokenizer.ggml.pre", "tokenizer.chat_template"))
    return str(pre.contents()) if pre else "", str(template.contents()) if template else ""


def _edit_json(path: Path, changes: dict[str, Any], dropped: tuple[str, ...]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    content.update(changes)
    for key in dropped:
        content.pop(key, None)
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
