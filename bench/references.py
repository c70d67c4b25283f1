"""What `transformers` says: greedy text in float32, one prompt at a time, and how close each choice was.

Owns the reference run and its cache on disk; compares nothing. Invariant: a cached answer is only ever used for the
same weights, prompt, length and versions, because these are its name.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pdserve.config import cache_folder, child_environment
from pdserve.errors import PDServeError
from pdserve.machine import allowed_cores
from pdserve.model.spec import read_spec

NUM_TOP = 20  # of the likeliest tokens whose log-probabilities are kept
FORMAT = 1  # of the cached files
FEWEST = 4  # prompts that are worth a process of their own

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The end-of-text token is generated like any other: every answer has the full length."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    gaps: tuple[float, ...]  # per token: largest logit minus second largest
    top_ids: tuple[tuple[int, ...], ...]  # per token: the likeliest, best first
    top_logprobs: tuple[tuple[float, ...], ...]


def references(
    directory: Path, prompts: Sequence[Sequence[int]], num_new: int, *, say: Say, cache: Path | None = None
) -> list[Reference]:
    """One per prompt, from the cache where it has them; the model is loaded only when it has not."""
    folder = cache_folder() / "references" if cache is None else cache
    folder.mkdir(parents=True, exist_ok=True)
    identity = (read_spec(directory).fingerprint, num_new, _versions())
    paths = [folder / f"{_digest(identity, prompt)}.json" for prompt in prompts]
    missing = [(path, prompt) for path, prompt in zip(paths, prompts, strict=True) if not path.is_file()]
    num_processes = min(len(allowed_cores()), len(missing) // FEWEST)
    if num_processes > 1:
        _generate_apart(directory, num_new, missing, num_processes, say)
    elif missing:
        _generate_here(directory, num_new, missing, say)
    return [_read(path) for path in paths]


Missing = Sequence[tuple[Path, Sequence[int]]]


def _generate_here(directory: Path, num_new: int, missing: Missing, say: Say) -> None:
    generate = _Generator(directory, num_new)
    for done, (path, prompt) in enumerate(missing):
        say(f"references from transformers: {done} of {len(missing)}")
        _write(path, generate(prompt))
    generate.close()


def _generate_apart(directory: Path, num_new: int, missing: Missing, num_processes: int, say: Say) -> None:
    """One thread in each of several processes: threads of one product would wait for each other at every layer."""
    command = [sys.executable, "-m", "bench.references", str(directory), str(num_new)]
    children = []
    for index in range(num_processes):
        child = subprocess.Popen(command, stdin=subprocess.PIPE, env=child_environment(1))
        assert child.stdin is not None
        with child.stdin:
            share = [(str(path), list(prompt)) for path, prompt in missing[index::num_processes]]
            child.stdin.write(json.dumps(share).encode())
        children.append(child)
    try:
        while any(child.poll() is None for child in children):
            done = sum(path.is_file() for path, _ in missing)
            say(f"references from transformers: {done} of {len(missing)}")
            time.sleep(0.2)
    finally:
        for child in children:
            child.kill()
            child.wait()
    if any(child.returncode for child in children):
        raise PDServeError("the references could not be made; transformers said why above")


class _Generator:
    """The model in float32 and its `generate`."""

    def __init__(self, directory: Path, num_new: int) -> None:
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._torch: Any = torch
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._num_new = num_new
        self._model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None

    def __call__(self, prompt: Sequence[int]) -> Reference:
        torch = self._torch
        ids = torch.tensor([list(prompt)])
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=self._num_new,
            pad_token_id=0,
            use_cache=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = out.sequences[0, len(prompt) :].tolist()
        assert len(tokens) == self._num_new, (len(tokens), self._num_new)
        logits = torch.cat(out.logits).float()
        best = logits.topk(2, dim=-1).values
        top = logits.log_softmax(dim=-1).topk(min(NUM_TOP, logits.shape[-1]), dim=-1)
        return Reference(
            prompt=tuple(prompt),
            tokens=tuple(tokens),
            gaps=tuple((best[:, 0] - best[:, 1]).tolist()),
            top_ids=tuple(map(tuple, top.indices.tolist())),
            top_logprobs=tuple(map(tuple, top.values.tolist())),
        )

    def close(self) -> None:
        self._torch.set_num_threads(self._threads)


def _versions() -> tuple[str, ...]:
    return tuple(importlib.metadata.version(package) for package in ("transformers", "torch"))


def _digest(identity: tuple[object, ...], prompt: Sequence[int]) -> str:
    text = repr((FORMAT, NUM_TOP, *identity, tuple(prompt)))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _write(path: Path, reference: Reference) -> None:
    """Whole or not at all: written beside its place and renamed."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".reference-", delete=False) as handle:
        json.dump(asdict(reference), handle)
    os.replace(handle.name, path)


def _read(path: Path) -> Reference:
    fields = json.loads(path.read_text())
    return Reference(
        prompt=tuple(fields["prompt"]),
        tokens=tuple(fields["tokens"]),
        gaps=tuple(fields["gaps"]),
        top_ids=tuple(map(tuple, fields["top_ids"])),
        top_logprobs=tuple(map(tuple, fields["top_logprobs"])),
    )


def main() -> None:
    """A process of `_generate_apart`: arguments FOLDER NUM_NEW, and pairs of (path, prompt) as JSON on stdin."""
    share = [(Path(path), prompt) for path, prompt in json.load(sys.stdin)]
    _generate_here(Path(sys.argv[1]), int(sys.argv[2]), share, lambda text: None)


if __name__ == "__main__":
    main()
