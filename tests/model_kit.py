"""Tiny random checkpoints, a runner over a small pool, and transformers' greedy answers to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from pd_kernels import select
from pdserve.model.decoder import Decoder
from pdserve.model.runner import Runner, SampleRow, Work
from pdserve.model.spec import read_spec
from pdserve.model.weights import DTYPES, load
from pdserve.request import Sampling

VOCAB = 199
_TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.2,  # large enough that greedy text does not settle into one token
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _config(family: str) -> transformers.PreTrainedConfig:
    match family:
        case "llama3":
            return transformers.LlamaConfig(**_TINY, rope_parameters=_LLAMA3, tie_word_embeddings=False)
        case "linear":
            rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
            return transformers.LlamaConfig(**_TINY, rope_parameters=rope, attention_bias=True, mlp_bias=True)
        case "smollm2":
            shape = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144}
            return transformers.LlamaConfig(**{**_TINY, **shape}, tie_word_embeddings=True)
        case "mistral":
            return transformers.MistralConfig(**_TINY, head_dim=32, sliding_window=None)
        case "qwen2":
            return transformers.Qwen2Config(**_TINY)
        case "qwen3":
            return transformers.Qwen3Config(**_TINY, head_dim=32, tie_word_embeddings=True)
    raise AssertionError(family)


FAMILIES = ("llama3", "linear", "smollm2", "mistral", "qwen2", "qwen3")


def save_tiny(family: str, directory: Path, seed: int = 0) -> Path:
    """A random checkpoint of the family, as transformers writes it; biases and norms are random too."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(_config(family))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    return directory


def prompts(lengths: Sequence[int], vocab: int = VOCAB, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]


def reference(directory: Path, dtype: str = "float32") -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[dtype]).eval()


def reference_greedy(model: transformers.PreTrainedModel, prompt: list[int], num_new: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=num_new,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


class Engine:
    """A runner and the simplest of schedulers: everything runs at once, each request in its own blocks."""

    def __init__(
        self,
        directory: Path,
        *,
        dtype: str = "float32",
        num_blocks: int = 512,
        block_size: int = 16,
        force: str = "auto",
        int8: bool = False,
    ) -> None:
        self.spec = read_spec(directory)
        kernels = select("cpu", dtype, self.spec.head_dim, force)
        weights = load(directory, self.spec, device="cpu", dtype=dtype, kernels=kernels, int8=int8)
        layout = self.spec.kv_layout(dtype=dtype, block_size=block_size)
        kv = torch.full(layout.shape(num_blocks), torch.nan, dtype=DTYPES[dtype])
        self.runner = Runner(Decoder(self.spec, weights, kernels), kv)
        self._next_block = 1

    def take(self, num_tokens: int) -> list[int]:
        """Fresh blocks, handed out backwards so that a table is never a plain range."""
        count = -(-num_tokens // self.runner.block_size)
        blocks = list(range(self._next_block, self._next_block + count))[::-1]
        self._next_block += count
        return blocks

    def generate(
        self, prompts: Sequence[list[int]], num_new: int, *, chunk: int = 10**9, **sampling: object
    ) -> list[list[int]]:
        """Tokens of every prompt, all in one batch; prompts are prefilled `chunk` tokens per step."""
        params = Sampling(max_tokens=num_new, **{"temperature": 0.0, **sampling})
        tables = [self.take(len(prompt) + num_new) for prompt in prompts]
        outputs: list[list[int]] = [[] for _ in prompts]
        cached = [0] * len(prompts)
        while any(len(output) < num_new for output in outputs):
            running = [index for index, output in enumerate(outputs) if len(output) < num_new]
            works = []
            for index in running:
                known = prompts[index] + outputs[index]
                tokens = known[cached[index] : cached[index] + chunk]
                row = SampleRow(
                    sampling=params,
                    seed=params.seed,
                    prompt=prompts[index],
                    output=tuple(outputs[index]),
                    position=len(known),
                )
                is_last = cached[index] + len(tokens) == len(known)
                works.append(
                    Work(
                        tokens=tokens, start=cached[index], block_table=tables[index], sample=(row,) if is_last else ()
                    )
                )
                cached[index] += len(tokens)
            for index, drawn in zip(running, self.runner.step(works), strict=True):
                outputs[index].extend(sampled.token for sampled in drawn)
        return outputs
