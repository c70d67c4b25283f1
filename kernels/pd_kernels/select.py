"""The one place that chooses kernels.

Owns which set serves a device, dtype and head size, and the line that says why; owns no kernel.
Invariant: a forced set is used or refused, never replaced; `auto` falls back to the reference aloud, in `why`.
"""

from __future__ import annotations

import torch

from pd_kernels.cpu import build
from pd_kernels.cpu.attention import CpuDecode, CpuPrefill
from pd_kernels.cpu.layer import CpuLayer, CpuSampling
from pd_kernels.cpu.library import Library, load
from pd_kernels.protocols import KernelSet
from pd_kernels.reference import reference_set

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SETS = ("reference", "cpu")
CPU_HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)
CPU_DTYPES = ("float32", "bfloat16")


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
    obstacle = _cpu_obstacle(kind, dtype, head_dim)
    if obstacle is None:
        try:
            return _cpu_set(load(tools or build.Toolchain()), dtype)
        except build.BuildError as error:
            obstacle = str(error)
    if force == "cpu":
        raise KernelError(f"the cpu kernels cannot be used: {obstacle}")
    return reference_set(device, f"reference: plain torch, because {obstacle}")


def _cpu_obstacle(kind: str, dtype: str, head_dim: int) -> str | None:
    if kind != "cpu":
        return f"the native kernels run on cpu, not on {kind}"
    if dtype not in CPU_DTYPES:
        return f"the native kernels take {' and '.join(CPU_DTYPES)}, not {dtype}"
    if head_dim not in CPU_HEAD_DIMS:
        return f"the native kernels take head_dim {', '.join(map(str, CPU_HEAD_DIMS))}, not {head_dim}"
    return None


def _cpu_set(library: Library, dtype: str) -> KernelSet:
    return KernelSet(
        name="cpu",
        why=f"cpu: native code for {library.isa}, {dtype}, {torch.get_num_threads()} thread(s)",
        prefill=CpuPrefill(library),
        decode=CpuDecode(library),
        layer=CpuLayer(library, DTYPES[dtype]),
        sampling=CpuSampling(library),
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
    return lines
