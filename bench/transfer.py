"""`pdserve bench transfer`: how fast each link moves blocks, beside a bare copy of the same bytes by the same means.

Owns the shapes, the peers' process and the bare copies; the links are those that serve. Invariant: source blocks are
written before they are read, so no page is a shared zero page, and both sides of a ratio move the same blocks in turns.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import zmq

from bench.report import BenchOptions, Check, Report, Row, at_least
from kv_transfer.links import BlockRead, Reader
from kv_transfer.offers import openers
from kv_transfer.plan import adjacent
from kv_transfer.pool import Pool
from kv_transfer.shm_reader import ShmReader
from kv_transfer.stand_in import StandIn
from kv_transfer.syscalls import Iovecs, read_process
from kv_transfer.tcp import SLICE_BYTES
from pdserve.channel import new_epoch
from pdserve.errors import TransferError
from pdserve.layout import KVLayout
from pdserve.terminal import Progress

COUNTS = (1, 16, 128, 1024)  # blocks
BIG = 128  # from here on the share of the bare copy is a target
SHARES = {"shm": 0.85, "tcp": 0.7}
SHAPES = {
    "SmolLM2-135M": KVLayout(model="b", dtype="bfloat16", num_layers=30, num_kv_heads=3, head_dim=64, block_size=16),
    "Llama-8B": KVLayout(model="b", dtype="bfloat16", num_layers=32, num_kv_heads=8, head_dim=128, block_size=16),
}
MOST_BYTES = 3 * 10**9  # of one pool
SLICE_S = 0.002
_SENDER = """
import sys, zmq
context = zmq.Context()
socket = context.socket(zmq.REP)
port = socket.bind_to_random_port("tcp://127.0.0.1")
print(port, flush=True)
payload = bytes(int(sys.argv[1]))
while (size := int(socket.recv())) > 0:
    pieces = [payload] * (size // len(payload)) + ([payload[: size % len(payload)]] if size % len(payload) else [])
    socket.send_multipart(pieces, copy=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Which blocks of the peer go where: in order, or in single blocks all over both pools."""

    order: str
    sources: tuple[int, ...]
    destinations: tuple[int, ...]


def blocks_of(count: int, num_blocks: int, order: str, rng: random.Random) -> Blocks:
    if order == "in order":
        return Blocks(order=order, sources=tuple(range(1, count + 1)), destinations=tuple(range(1, count + 1)))
    sources, destinations = (tuple(rng.sample(range(1, num_blocks), count)) for _ in range(2))
    return Blocks(order=order, sources=sources, destinations=destinations)


def read_s(reader: Reader, read: BlockRead) -> float:
    """Seconds from the request to the validated end. Raises TransferError when it fails."""
    poller = zmq.Poller()
    if reader.waitable is not None:
        poller.register(reader.waitable, zmq.POLLIN)
    began_s = time.perf_counter()
    reader.start(read)
    while reader.num_pending:
        for result in reader.poll(SLICE_S):
            if not result.ok:
                raise TransferError(f"{reader.kind}: {result.reason}", reason=result.reason)
        if reader.num_pending and reader.waitable is not None:
            poller.poll(100)
    return time.perf_counter() - began_s


class BareProcessRead:
    """`process_vm_readv` of as many bytes, in one call where the kernel's limit of pieces allows."""

    def __init__(self, pool: Pool, owner: StandIn, address: int) -> None:
        self._pool, self._pid, self._address = pool, owner.process.pid, address

    def seconds(self, blocks: Blocks) -> float:
        local = self._pieces(self._pool.memory.address, blocks.destinations)
        remote = self._pieces(self._address, blocks.sources)
        began_s = time.perf_counter()
        for at in range(0, max(len(local), len(remote)), 1024):
            read_process(self._pid, local[at : at + 1024], remote[at : at + 1024])
        return time.perf_counter() - began_s

    def close(self) -> None:
        pass

    def _pieces(self, address: int, blocks: tuple[int, ...]) -> Iovecs:
        pieces = np.array(adjacent(blocks), dtype=np.uint64) * np.uint64(self._pool.block_bytes)
        pieces[:, 0] += np.uint64(address)
        return pieces


class BareZeroMQ:
    """One process sends as many bytes in frames as large as the link's, this one receives them."""

    def __init__(self, context: zmq.Context[Any], block_bytes: int) -> None:
        self._block_bytes = block_bytes
        command = [sys.executable, "-c", _SENDER, str(SLICE_BYTES)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._socket = context.socket(zmq.REQ)
        self._socket.connect(f"tcp://127.0.0.1:{int(self._process.stdout.readline())}")

    def seconds(self, blocks: Blocks) -> float:
        num_bytes = len(blocks.sources) * self._block_bytes
        began_s = time.perf_counter()
        self._socket.send(str(num_bytes).encode())
        frames = self._socket.recv_multipart(copy=False)
        taken_s = time.perf_counter() - began_s
        assert sum(len(frame) for frame in frames) == num_bytes
        return taken_s

    def close(self) -> None:
        self._socket.send(b"0")
        self._socket.close(linger=1000)
        self._process.wait(10)


def rows_of(kind: str, name: str, options: BenchOptions, say: Callable[[str], None]) -> Iterator[Row]:
    """Every count of blocks in order and scattered, link and bare copy in turns."""
    layout, repeats, rng = SHAPES[name], 5 if options.is_quick else 11, random.Random(options.seed)
    most = 128 if options.is_quick else max(COUNTS)
    num_blocks = min(2 * most, MOST_BYTES // layout.block_bytes)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pool = Pool(num_blocks=num_blocks, block_bytes=layout.block_bytes, epoch=new_epoch())
    with (
        tempfile.TemporaryDirectory(prefix="pdserve-bench-") as folder,
        StandIn(kind, Path(folder) / "run", layout=layout, num_blocks=num_blocks) as owner,
    ):
        for block in range(1, num_blocks):
            owner.say(f"fill {block} {block % 251 + 1}")
        pool.buffer[:] = 1
        reader = openers(pool, kinds=kind, context=context, slice_s=SLICE_S)[kind](owner.peer.links[0], owner.peer)
        bare: BareZeroMQ | BareProcessRead
        if isinstance(reader, ShmReader):
            bare = BareProcessRead(pool, owner, reader.address)
        else:
            bare = BareZeroMQ(context, layout.block_bytes)
        for count in (each for each in COUNTS if each <= min(most, num_blocks // 2)):
            for order in ("in order", "scattered"):
                say(f"{kind}, {name}: {count} blocks {order}")
                blocks = blocks_of(count, num_blocks, order, rng)
                read = BlockRead(
                    read_id=order, sources=blocks.sources, generations=(1,) * count, destinations=blocks.destinations
                )
                num_bytes = count * layout.block_bytes
                pairs = [(read_s(reader, read), bare.seconds(blocks)) for _ in range(repeats + 1)][1:]
                taken_s, plain_s = (median(side) for side in zip(*pairs, strict=True))
                yield Row(
                    name=f"transfer_{kind}",
                    value=num_bytes / taken_s / 1e9,
                    unit="GB/s",
                    parameters={"model": name, "blocks": count, "order": order, "ms": round(1e3 * taken_s, 3)},
                    ceiling=num_bytes / plain_s / 1e9,
                )
        reader.close()
        bare.close()
    context.term()
    pool.close()


def checks_of(rows: list[Row]) -> Iterator[Check]:
    for kind, least in SHARES.items():
        for name in SHAPES:
            found = [row for row in rows if row.name == f"transfer_{kind}" and row.parameters["model"] == name]
            shares = [row.value / row.ceiling for row in found if row.ceiling and row.parameters["blocks"] >= BIG]
            if shares:
                yield at_least(f"{kind}, {name}, {BIG} blocks and more", min(shares), least, "of the bare copy")


def main(options: BenchOptions) -> int:
    """Runs it all; the exit status."""
    report = Report(options)
    with Progress() as say:
        for kind in SHARES:
            for name in SHAPES:
                report.rows.extend(rows_of(kind, name, options, say))
    report.checks.extend(checks_of(report.rows))
    return report.finish()
