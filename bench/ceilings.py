"""The best this machine can do: bytes read per second and multiply-adds per second, on the cores allowed now.

Owns the small native reader and the choice of the best; knows no model. Invariant: a ceiling is the best of every way
tried, so that a share of it is never flattered.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from pd_kernels.cpu.arena import Arena
from pd_kernels.cpu.build import Toolchain
from pd_kernels.protocols import LayerKernels

STREAMS = (1, 4, 8)
AHEAD_BYTES = (0, 1024, 4096)  # software prefetch; 0 is none
_SOURCE = r"""
#include <cstddef>
#include <cstdint>
typedef uint64_t Line __attribute__((vector_size(64)));
template <int streams> static uint64_t read_lines(const Line* data, size_t lines, size_t ahead) {
    size_t part = lines / streams;
    Line sums[streams] = {};
    for (size_t i = 0; i < part; i++)
        for (int s = 0; s < streams; s++) {
            const Line* at = data + s * part + i;
            if (ahead) __builtin_prefetch(at + ahead);
            sums[s] ^= *at;
        }
    uint64_t total = 0;
    for (int s = 0; s < streams; s++)
        for (int lane = 0; lane < 8; lane++) total ^= sums[s][lane];
    return total;
}
extern "C" uint64_t read_all(const void* data, size_t bytes, int streams, size_t ahead_bytes) {
    const Line* lines = static_cast<const Line*>(data);
    size_t count = bytes / sizeof(Line), ahead = ahead_bytes / sizeof(Line);
    if (streams == 8) return read_lines<8>(lines, count, ahead);
    if (streams == 4) return read_lines<4>(lines, count, ahead);
    return read_lines<1>(lines, count, ahead);
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    per_s: float  # bytes, or floating point operations
    how: str  # what was fastest


def time_s(work: Callable[[], object], repeats: int = 3) -> float:
    """The median of `repeats` runs after one that is not counted."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)


class ReadBandwidth:
    """Reads huge pages in every way it knows; compiled once, one buffer for the largest size asked for."""

    def __init__(self, largest_bytes: int) -> None:
        self._buffer = Arena().empty((largest_bytes,), torch.uint8)
        self._buffer.fill_(1)
        self._read = _compiled()

    def measure(self, num_bytes: int) -> Ceiling:
        """The fastest way through `num_bytes`."""
        part = self._buffer[:num_bytes]
        return max(
            (Ceiling(per_s=num_bytes / time_s(work), how=how) for how, work in self._ways(part)),
            key=lambda each: each.per_s,
        )

    def _ways(self, part: Tensor) -> Iterable[tuple[str, Callable[[], object]]]:
        wide = part[: part.numel() // 8 * 8].view(torch.int64)
        yield "torch.sum", lambda: wide.sum()
        read = self._read
        if read is None:
            return
        for streams in STREAMS:
            for ahead in AHEAD_BYTES:
                how = f"{streams} streams, prefetch {ahead} bytes ahead" if ahead else f"{streams} streams"
                yield how, lambda s=streams, a=ahead: read(part.data_ptr(), part.numel(), s, a)  # type: ignore[misc]


def _compiled() -> Callable[[int, int, int, int], int] | None:
    """The native reader; None without a compiler, where torch alone has to do."""
    compiler = Toolchain().compiler()
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as folder:
        source, library = Path(folder) / "read.cpp", Path(folder) / "read.so"
        source.write_text(_SOURCE)
        command = [compiler, "-O3", "-march=native", "-Wno-psabi", "-shared", "-fPIC", str(source), "-o", str(library)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return None
        read: Callable[[int, int, int, int], int] = ctypes.CDLL(str(library)).read_all
    read.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_size_t]  # type: ignore[attr-defined]
    read.restype = ctypes.c_uint64  # type: ignore[attr-defined]
    return read


def gemm(shapes: Sequence[tuple[int, int]], dtype: torch.dtype, kernels: LayerKernels, rows: int = 512) -> Ceiling:
    """The best rate over the model's own `shapes` (out, in) at `rows` rows and over 2048 cubed, torch's and ours."""
    best = Ceiling(per_s=0.0, how="")
    for num_rows, (n, k) in [*((rows, shape) for shape in shapes), (2048, (2048, 2048))]:
        x = torch.randn(num_rows, k).to(dtype)
        weight = torch.randn(n, k).to(dtype)
        packed = kernels.pack_linear(weight.clone(), None)
        ways: list[tuple[str, Callable[[], object]]] = [
            ("torch", lambda x=x, w=weight: torch.nn.functional.linear(x, w)),  # type: ignore[misc]
            ("pd_kernels", lambda x=x, p=packed: p(x)),  # type: ignore[misc]
        ]
        for name, work in ways:
            per_s = 2 * num_rows * n * k / time_s(work)
            if per_s > best.per_s:
                best = Ceiling(per_s=per_s, how=f"{name}, {num_rows} x {k} x {n}")
    return best


def copy_bandwidth(num_bytes: int) -> Ceiling:
    """Bytes copied per second from one buffer in huge pages to another; each is read once and written once."""
    arena = Arena()
    source, target = (arena.empty((num_bytes // 8,), torch.int64) for _ in range(2))
    source.fill_(1)
    target.fill_(2)
    return Ceiling(per_s=num_bytes / time_s(lambda: target.copy_(source)), how="torch copy_")
