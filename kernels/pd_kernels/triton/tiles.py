"""Tile sizes of the attention kernels: a small table, and what `tune` measured on this very machine.

Owns the table and the tuned files in the kernel cache folder; measures nothing.
Invariant: a tuned file is used only for the device, Triton version, dtype and head size in its name, and a file that
cannot be read or makes no sense is as good as none: the table serves.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import triton

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    rows: int  # query rows of a prefill tile, heads of the group times tokens; decode pads its group to 16 or more
    keys: int  # cache rows per step
    warps: int
    stages: int  # loads in flight

    def is_sound(self) -> bool:
        """Whether a compiler could take it: powers of two that `tl.dot` accepts."""
        sizes = (self.rows, self.keys, self.warps)
        if not all(isinstance(x, int) and x > 0 and x & (x - 1) == 0 for x in sizes):
            return False
        return 16 <= self.rows <= 256 and 16 <= self.keys <= 256 and self.warps <= 16 and self.stages in range(1, 9)


def _row(rows: int, keys: int, warps: int, stages: int) -> Tiles:
    return Tiles(rows=rows, keys=keys, warps=warps, stages=stages)


# By head size up to and including. Block ids must arrive before the rows they name can be asked for, so half of the
# `stages` loads in flight are ids: 3 and 5 stages hold two and three steps of keys and values in shared memory (one and
# two where products wait for their operands: Ampere, and decode). A step takes keys * padded head_dim * 2 tensors * 2
# bytes; the queries come on top.
HOPPER = {  # 227 KiB of shared memory per block; products of 64 rows by a group of four warps
    "prefill": {64: _row(128, 128, 8, 3), 128: _row(128, 64, 8, 5), 256: _row(128, 32, 8, 3)},
    "decode": {64: _row(16, 128, 4, 5), 128: _row(16, 64, 4, 5), 256: _row(16, 32, 4, 5)},
}
AMPERE = {  # up to 99 KiB, so that it also serves the consumer cards
    "prefill": {64: _row(128, 64, 4, 3), 128: _row(128, 32, 8, 3), 256: _row(64, 32, 8, 3)},
    "decode": {64: _row(16, 64, 4, 5), 128: _row(16, 64, 4, 5), 256: _row(16, 32, 4, 5)},
}
FLOAT32 = {  # no tensor cores: small tiles, held in registers
    "prefill": {64: _row(32, 32, 8, 2), 128: _row(16, 16, 4, 2), 256: _row(16, 16, 8, 2)},
    "decode": {64: _row(16, 32, 8, 2), 128: _row(16, 16, 8, 2), 256: _row(16, 16, 8, 2)},
}
INTERPRETER = {"prefill": {256: _row(32, 32, 4, 1)}, "decode": {256: _row(16, 32, 4, 1)}}


def table_tiles(phase: Phase, capability: tuple[int, int] | None, dtype: torch.dtype, head_dim: int) -> Tiles:
    """The table's entry; `capability` is the CUDA compute capability, None under the interpreter."""
    if capability is None:
        table = INTERPRETER
    elif dtype is torch.float32:
        table = FLOAT32
    else:
        table = HOPPER if capability[0] in (9, 10) else AMPERE
    return next(tiles for limit, tiles in table[phase].items() if head_dim <= limit)


class TileBook:
    """Tiles per phase, device, dtype and head size: tuned ones from `folder` where there are any, else the table's.

    `only` overrides both: what `tune` tries out.
    """

    def __init__(self, folder: Path | None = None, *, only: Tiles | None = None) -> None:
        self._folder = folder
        self._only = only
        self._known: dict[tuple[Phase, torch.device, torch.dtype, int], Tiles] = {}

    def tiles(self, phase: Phase, device: torch.device, dtype: torch.dtype, head_dim: int) -> Tiles:
        if self._only is not None:
            return self._only
        key = (phase, device, dtype, head_dim)
        if key not in self._known:
            tuned = load(self._folder, device, dtype, head_dim) if self._folder is not None else {}
            capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
            self._known[key] = tuned.get(phase) or table_tiles(phase, capability, dtype, head_dim)
        return self._known[key]


def tuned_path(folder: Path, device: torch.device, dtype: torch.dtype, head_dim: int) -> Path:
    """Such as triton-nvidia-h200-3.6.0-bfloat16-128.json."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
    words = f"triton-{name}-{triton.__version__}-{str(dtype).removeprefix('torch.')}-{head_dim}"
    return folder / f"{re.sub(r'[^a-z0-9.]+', '-', words.lower())}.json"


def load(folder: Path, device: torch.device, dtype: torch.dtype, head_dim: int) -> dict[Phase, Tiles]:
    """What `save` wrote, by phase; phases that are missing or senseless are left out."""
    try:
        stored = json.loads(tuned_path(folder, device, dtype, head_dim).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    found: dict[Phase, Tiles] = {}
    phases: tuple[Phase, ...] = ("prefill", "decode")
    for phase in phases:
        try:
            tiles = Tiles(**stored[phase])
            if tiles.is_sound():
                found[phase] = tiles
        except (KeyError, TypeError):
            continue
    return found


def save(folder: Path, device: torch.device, dtype: torch.dtype, head_dim: int, tiles: dict[Phase, Tiles]) -> Path:
    """Write the file aside and rename it, so that racing processes read a whole one. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    target = tuned_path(folder, device, dtype, head_dim)
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".tiles-", delete=False, encoding="utf-8") as file:
        json.dump({phase: asdict(entry) for phase, entry in tiles.items()}, file, indent=1)
    os.replace(file.name, target)
    return target
