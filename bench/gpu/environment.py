"""Which GPU, driver and libraries these are, and the ceilings that other sections are held to.

Owns their names in the report; measures with `timing`. Invariant: nothing here depends on our kernels.
"""

from __future__ import annotations

import platform
import subprocess
from typing import Any

import torch
import triton

from bench.gpu.section import Setting, Sink
from bench.gpu.timing import copy_ceiling, gemm_ceiling, read_ceiling

HOPPER = (9, 0)


def run(setting: Setting, sink: Sink) -> None:
    sink.attempt("gpu", setting, lambda: _device(setting, sink))
    sink.attempt("ceilings", setting, lambda: _ceilings(setting, sink))


def ceilings(setting: Setting) -> dict[str, float]:
    """Those of the environment section, or, where it left none, a quick reading of our own."""
    if {"read", "gemm"} <= set(setting.ceilings):
        return dict(setting.ceilings)
    read = read_ceiling(setting.device, 1 << (20 if setting.is_dry else 31))
    gemm = gemm_ceiling(setting.device, (64,) if setting.is_dry else (8192,), _dtype(setting))
    return {"read": read.per_s, "gemm": gemm.per_s}


def _dtype(setting: Setting) -> torch.dtype:
    return torch.float32 if setting.is_dry else torch.bfloat16


def _device(setting: Setting, sink: Sink) -> None:
    about: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
    about["python"] = platform.python_version()
    if setting.is_dry:
        sink.row("gpu", 0, "bytes", gpu_name="none, dry", **about)
        return
    properties = torch.cuda.get_device_properties(setting.device)
    capability = torch.cuda.get_device_capability(setting.device)
    about |= {"gpu_name": properties.name, "capability": ".".join(map(str, capability))}
    about |= {"multiprocessors": properties.multi_processor_count, "l2_bytes": properties.L2_cache_size}
    sink.row("gpu", properties.total_memory, "bytes", **about, **_driver())
    sink.holds("gpu_is_hopper", capability == HOPPER, f"compute capability {about['capability']}, not 9.0")


def _driver() -> dict[str, Any]:
    fields = ("driver_version", "clocks.sm", "clocks.max.sm", "power.limit")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return {"driver_version": f"unknown: {type(error).__name__}"}
    return dict(zip(fields, (word.strip() for word in done.stdout.split(",")), strict=False))


def _ceilings(setting: Setting, sink: Sink) -> None:
    is_dry, device = setting.is_dry, setting.device
    num_bytes = 1 << (20 if is_dry else 32)
    read = read_ceiling(device, num_bytes)
    sink.row("ceiling_read", read.per_s / 1e9, "GB/s", how=read.how, bytes=num_bytes)
    copy = copy_ceiling(device, num_bytes)
    sink.row("ceiling_copy", copy.per_s / 1e9, "GB/s", how=copy.how, bytes=num_bytes)
    gemm = gemm_ceiling(device, (64,) if is_dry else (4096, 6144, 8192), _dtype(setting))
    sink.row("ceiling_gemm", gemm.per_s / 1e12, "TFLOP/s", how=gemm.how, dtype=str(_dtype(setting)))
