"""The compiled library, bound: argument types once, so that a call costs about two microseconds.

Owns loading and the C signatures (those of the `extern "C"` functions in src/); owns no tensor.
Invariant: a cached file that does not load is deleted and built once more before giving up.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_float, c_int, c_int64, c_uint64, c_void_p
from functools import lru_cache
from pathlib import Path

from pd_kernels.cpu.build import BuildError, Toolchain, build


class AttentionShape(ctypes.Structure):
    """Mirror of pd::AttentionShape in attention.h."""

    _fields_ = (
        ("requests", c_int64),
        ("q_heads", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
        ("block_size", c_int64),
        ("table_row", c_int64),
        ("block_stride", c_int64),
        ("kv_stride", c_int64),
        ("head_stride", c_int64),
        ("token_stride", c_int64),
        ("scale", c_float),
    )


class RopeShape(ctypes.Structure):
    """Mirror of pd::RopeShape in rope.h."""

    _fields_ = (
        ("tokens", c_int64),
        ("q_heads", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
        ("block_size", c_int64),
        ("block_stride", c_int64),
        ("kv_stride", c_int64),
        ("head_stride", c_int64),
        ("token_stride", c_int64),
    )


_SIGNATURES: dict[str, tuple[object, ...]] = {
    "pd_pack_tiles": (c_void_p, c_void_p, c_int64, c_int64),
    "pd_linear_tiles": (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int, c_int),
    "pd_linear_rows": (c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int, c_int),
    "pd_pack_int8_tiles": (c_void_p, c_void_p, c_int64, c_int64),
    "pd_int8_tiles": (*(c_void_p,) * 5, c_int64, c_int64, c_int64, c_int, c_int),
    "pd_int8_rows": (c_int, *(c_void_p,) * 5, c_int64, c_int64, c_int64, c_int, c_int),
    "pd_rms_norm": (c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float),
    "pd_silu_mul": (c_int, c_void_p, c_void_p, c_int64, c_int64),
    "pd_rope_write": (c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_float, c_void_p, c_void_p),
    "pd_gumbel": (c_uint64, c_uint64, c_void_p, c_int64, c_void_p),
    "pd_decode_attention": (c_int, c_int, *(c_void_p,) * 6, c_int),
    "pd_prefill_attention": (c_int, c_int, *(c_void_p,) * 7, c_int),
    "pd_decoder": (c_void_p,),
}


class Library:
    """The C functions, by their names without `pd_`."""

    def __init__(self, path: Path) -> None:
        handle = ctypes.CDLL(str(path))
        self.path = path
        for name, arguments in _SIGNATURES.items():
            function = getattr(handle, name)
            function.argtypes, function.restype = arguments, None
        self.pack_tiles = handle.pd_pack_tiles
        self.linear_tiles = handle.pd_linear_tiles
        self.linear_rows = handle.pd_linear_rows
        self.pack_int8_tiles = handle.pd_pack_int8_tiles
        self.int8_tiles = handle.pd_int8_tiles
        self.int8_rows = handle.pd_int8_rows
        self.rms_norm = handle.pd_rms_norm
        self.silu_mul = handle.pd_silu_mul
        self.rope_write = handle.pd_rope_write
        self.gumbel = handle.pd_gumbel
        self.decode_attention = handle.pd_decode_attention
        self.prefill_attention = handle.pd_prefill_attention
        self.decoder = handle.pd_decoder
        handle.pd_isa.restype = c_char_p
        self.isa: str = handle.pd_isa().decode()
        self.has_amx = bool(handle.pd_enable_amx())


@lru_cache(maxsize=8)
def load(tools: Toolchain) -> Library:
    """Build if needed, then load. Raises BuildError with one line."""
    path = build(tools)
    try:
        return Library(path)
    except (OSError, AttributeError):
        path.unlink(missing_ok=True)
    try:
        return Library(build(tools))
    except (OSError, AttributeError) as error:
        raise BuildError(f"the compiled kernels do not load: {error}") from error
