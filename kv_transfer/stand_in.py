"""A small process that owns a pool and serves it on one link: the other side for `pdserve doctor` and for tests.

Owns its pool and nothing else; commands come as lines on standard input and each is answered by one line, the first
line out being the offer. Invariant: it ends when its standard input does, so it never outlives who started it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO

import zmq

from kv_transfer.header import new_epoch
from kv_transfer.links import Export
from kv_transfer.pool import Pool
from kv_transfer.shm import ShmExport
from kv_transfer.syscalls import allow_reads_by
from kv_transfer.tcp import TcpExport
from pdserve.layout import KVLayout
from pdserve.messages import LinkOffer, PeerInfo


def export(kind: str, pool: Pool, folder: Path) -> Export:
    if kind == "shm":
        return ShmExport(pool, folder=folder, name=pool.header.epoch[:16])
    return TcpExport(pool, context=zmq.Context.instance(), bind="tcp://127.0.0.1:0")


def obey(pool: Pool, words: list[str]) -> str:
    """fill BLOCK BYTE | bump BLOCK | generation BLOCK | epoch NAME"""
    match words:
        case ["fill", block, byte]:
            pool.bytes_of(int(block))[:] = int(byte)
        case ["bump", block]:
            pool.header.bump(int(block))
        case ["generation", block]:
            return str(pool.header.generation(int(block)))
        case ["epoch", name]:
            pool.header.set_epoch(name)
        case _:
            return f"what is {' '.join(words)!r}?"
    return "ok"


def main(arguments: list[str], commands: IO[str], replies: IO[str]) -> None:
    kind, folder, num_blocks, block_bytes, epoch, shared, reader_pid = arguments
    allow_reads_by(int(reader_pid))
    pool = Pool(num_blocks=int(num_blocks), block_bytes=int(block_bytes), epoch=epoch, shared=shared == "shared")
    serving = export(kind, pool, Path(folder))
    print(json.dumps(asdict(serving.offer)), file=replies, flush=True)
    for line in commands:
        print(obey(pool, line.split()), file=replies, flush=True)
    serving.close()


class StandIn:
    """Starts the process and speaks to it; `peer` is what a roster would say of it."""

    def __init__(self, kind: str, folder: Path, *, layout: KVLayout, num_blocks: int, shared: bool = False) -> None:
        epoch = new_epoch()
        arguments = [kind, str(folder), str(num_blocks), str(layout.block_bytes), epoch]
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, *arguments, "shared" if shared else "private", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        offer = LinkOffer(**json.loads(self._line()))
        self.peer = PeerInfo(
            name="stand-in",
            role="prefill",
            epoch=epoch,
            endpoint="",
            layout=layout,
            num_blocks=num_blocks,
            links=(offer,),
        )

    def say(self, command: str) -> str:
        assert self.process.stdin is not None
        print(command, file=self.process.stdin, flush=True)
        return self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.communicate()

    def __enter__(self) -> StandIn:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


if __name__ == "__main__":
    main(sys.argv[1:], sys.stdin, sys.stdout)
