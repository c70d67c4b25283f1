"""The one place that chooses kernels.

Owns which set serves a device, dtype and head size, and the line that says why; owns no kernel.
Invariant: a forced set is used or refused, never replaced; `auto` falls back to the reference aloud, in `why`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from pd_kernels.cpu import build
from pd_kernels.cpu.attention import CpuDecode, CpuPrefill
from pd_kernels.cpu.fused import fuse
from pd_kernels.cpu.layer import CpuLayer, CpuSampling
from pd_kernels.cpu.library import Library, load
from pd_kernels.protocols import KernelSet
from pd_kernels.reference import reference_set

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SETS = ("reference", "cpu", "triton")
CPU_HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)
CPU_DTYPES = ("float32", "bfloat16")
MOST_TRITON_HEAD_DIM = 256


class KernelError(ValueError):
    """No kernel set does what was asked for; the message names the shape, dtype, device or set."""


def select(
    device: str, dtype: str, head_dim: int, force: str = "auto", tools: build.Toolchain | None = None
) -> KernelSet:
    """The kernels for `device` ("cpu", "cuda:0"), `dtype` ("bfloat16", ...) and `head_dim`. Raises KernelError.

    `force` is "auto" or the name of a set; `tools` is the compiler and cache folder for native code.
    """
    if force not in ("auto", *SETS):
        raise KernelError(f"there is no kernel set {force!r}; the sets are: auto, {', '.join(SETS)}")
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise KernelError(f"no kernels for device {device!r}; cpu and cuda:N are known")
    if dtype not in DTYPES:
        raise KernelError(f"no kernels for dtype {dtype!r}; known are {', '.join(DTYPES)}")
    if head_dim < 2 or head_dim % 2:
        raise KernelError(f"no kernels for head_dim {head_dim}: it must be even and positive")
    if force == "reference":
        return reference_set(device, "reference: plain torch, as asked for")
    tools = tools or build.Toolchain()
    wanted = force if force != "auto" else "cpu" if kind == "cpu" else "triton"
    obstacle = (_cpu_obstacle if wanted == "cpu" else _triton_obstacle)(kind, dtype, head_dim)
    if obstacle is None:
        try:
            return _cpu_set(load(tools), dtype) if wanted == "cpu" else _triton_set(device, dtype, tools.folder)
        except build.BuildError as error:
            obstacle = str(error)
    if force != "auto":
        raise KernelError(f"the {force} kernels cannot be used: {obstacle}")
    return reference_set(device, f"reference: plain torch, because {obstacle}")


def _cpu_obstacle(kind: str, dtype: str, head_dim: int) -> str | None:
    if kind != "cpu":
        return f"the native kernels run on cpu, not on {kind}"
    if dtype not in CPU_DTYPES:
        return f"the native kernels take {' and '.join(CPU_DTYPES)}, not {dtype}"
    if head_dim not in CPU_HEAD_DIMS:
        return f"the native kernels take head_dim {', '.join(map(str, CPU_HEAD_DIMS))}, not {head_dim}"
    return None


def _triton_obstacle(kind: str, dtype: str, head_dim: int) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if kind == "cpu":
        from pd_kernels.triton.arguments import INTERPRETED

        if not INTERPRETED:
            return "the Triton kernels run on cuda:N; on cpu only interpreted, with TRITON_INTERPRET=1"
        if dtype == "bfloat16":
            return "Triton's interpreter multiplies bfloat16 wrongly; use float32 or float16"
    elif not torch.cuda.is_available():
        return "this PyTorch finds no GPU"
    if head_dim > MOST_TRITON_HEAD_DIM:
        return f"the Triton kernels take head_dim up to {MOST_TRITON_HEAD_DIM}, not {head_dim}"
    return None


def _triton_set(device: str, dtype: str, folder: Path) -> KernelSet:
    from pd_kernels.triton.decode import TritonDecode
    from pd_kernels.triton.layer import TritonLayer
    from pd_kernels.triton.prefill import TritonPrefill
    from pd_kernels.triton.sampling import TritonSampling
    from pd_kernels.triton.tiles import TileBook

    book = TileBook(folder)
    where = torch.cuda.get_device_name(device) if device.startswith("cuda") else "interpreted on the CPU"
    return KernelSet(
        name="triton",
        why=f"triton: {where}, {dtype}",
        prefill=TritonPrefill(book),
        decode=TritonDecode(book),
        layer=TritonLayer(),
        sampling=TritonSampling(torch.device(device)),
    )


def _cpu_set(library: Library, dtype: str) -> KernelSet:
    return KernelSet(
        name="cpu",
        why=f"cpu: native code for {library.isa}, {dtype}, {torch.get_num_threads()} thread(s)",
        prefill=CpuPrefill(library),
        decode=CpuDecode(library),
        layer=CpuLayer(library, DTYPES[dtype]),
        sampling=CpuSampling(library),
        fuse=lambda layers, shape: fuse(library, layers, shape, DTYPES[dtype]),
    )


def describe(tools: build.Toolchain | None = None) -> list[str]:
    """Lines for `pdserve doctor`: compiler, cache folder, and what native code this machine gets."""
    tools = tools or build.Toolchain()
    compiler = tools.compiler()
    lines = [f"kernel cache: {tools.folder}"]
    try:
        version = build.compiler_version(compiler) if compiler else "none found"
        lines.append(f"C++ compiler: {compiler or ', '.join(tools.compilers)} ({version})")
        library = load(tools)
        tiles = "used" if library.has_amx else "not available"
        lines.append(f"cpu kernels: {library.isa}, AMX tiles {tiles}, {library.path.name}")
    except build.BuildError as error:
        lines.append(f"cpu kernels: none, plain torch is used: {error}")
    obstacle = _triton_obstacle("cuda", "bfloat16", MOST_TRITON_HEAD_DIM)
    lines.append(f"triton kernels: {f'none: {obstacle}' if obstacle else 'for every GPU here'}")
    return lines
