"""A worker's KV pool as links see it: blocks in memory, their generations, and a few blocks for the self-test.

Owns the memory and the header; which block is whose is the block manager's business. Behind the pool's own blocks lie
test blocks with a known pattern, which nobody rewrites, and scratch blocks, which only the self-test writes.
Invariant: `buffer` covers exactly the pool's own blocks, so no model step ever touches the others.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kv_transfer.header import GenerationHeader
from kv_transfer.memory import ByteArray, Memory, PoolMemory
from kv_transfer.syscalls import why_forbidden

_TEST_BYTES = 4 * 1024 * 1024
_MOST_TEST_BLOCKS = 16


def num_test_blocks(block_bytes: int) -> int:
    """About 4 MiB of them, so that a self-test measures more than the start of a copy."""
    return max(1, min(_MOST_TEST_BLOCKS, _TEST_BYTES // block_bytes))


def total_blocks(num_blocks: int, block_bytes: int) -> int:
    """Blocks that a pool of `num_blocks` occupies in memory, test and scratch blocks included."""
    return num_blocks + 2 * num_test_blocks(block_bytes)


def pattern_of(block: int, block_bytes: int) -> ByteArray:
    """What test block `block` (from 0) holds in every pool; no two are alike."""
    words = np.random.PCG64(block + 1).random_raw(-(-block_bytes // 8))
    return words.view(np.uint8)[:block_bytes]


class Pool:
    """`num_blocks` blocks of `block_bytes`, and what lies behind them."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_bytes: int,
        epoch: str,
        shared: bool | None = None,
        allocate: Callable[[int], Memory] | None = None,
    ) -> None:
        """Private memory, or a memfd when `shared`; None: a memfd only where peers cannot read this process's memory.

        `allocate` gives that many bytes elsewhere, on a device. Raises ConfigError when the memory does not fit.
        """
        self.why_shared = "asked for" if shared else why_forbidden() if shared is None else ""
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.total_blocks = total_blocks(num_blocks, block_bytes)
        num_test = num_test_blocks(block_bytes)
        self.test_blocks = range(num_blocks, num_blocks + num_test)
        self.scratch_blocks = range(num_blocks + num_test, self.total_blocks)
        size = self.total_blocks * block_bytes
        self.host = None if allocate else PoolMemory.allocate(size, shared=bool(self.why_shared))
        self.memory: Memory = allocate(size) if allocate else self.host  # type: ignore[assignment]
        self.header = GenerationHeader(num_blocks=num_blocks, epoch=epoch, num_fixed=2 * num_test)
        for index, block in enumerate(self.test_blocks):
            self.write(block, pattern_of(index, block_bytes))

    @property
    def buffer(self) -> ByteArray:
        """The pool's own blocks as bytes, for the KV tensor; of a pool in this machine's memory."""
        assert self.host is not None
        return self.host.buffer[: self.num_blocks * self.block_bytes]

    def bytes_of(self, block: int, count: int = 1) -> ByteArray:
        """A view of `count` consecutive blocks in this machine's memory."""
        assert self.host is not None and block >= 0 and block + count <= self.total_blocks, (block, count)
        return self.host.buffer[block * self.block_bytes : (block + count) * self.block_bytes]

    def read(self, block: int, count: int = 1) -> ByteArray:
        """`count` consecutive blocks, wherever the pool is; perhaps a view."""
        assert block >= 0 and block + count <= self.total_blocks, (block, count, self.total_blocks)
        return self.memory.read(block * self.block_bytes, count * self.block_bytes)

    def write(self, block: int, data: ByteArray) -> None:
        """Bytes of consecutive blocks, from `block` on."""
        assert block >= 0 and block * self.block_bytes + len(data) <= self.total_blocks * self.block_bytes, block
        self.memory.write(block * self.block_bytes, data)

    def close(self) -> None:
        """Close the file descriptors; the memory goes with its last view."""
        self.header.close()
        self.memory.close()
