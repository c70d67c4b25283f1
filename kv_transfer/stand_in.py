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

from kv_transfer.offers import export_pool
from kv_transfer.pool import Pool
from pdserve.channel import new_epoch
from pdserve.errors import TransferError
from pdserve.layout import KVLayout
from pdserve.messages import LinkOffer, PeerInfo

_SHARED = {"None": None, "True": True, "False": False}


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
    pool = Pool(num_blocks=int(num_blocks), block_bytes=int(block_bytes), epoch=epoch, shared=_SHARED[shared])
    serving = export_pool(pool, kinds=kind, folder=Path(folder), reader_pid=int(reader_pid))
    print(json.dumps(asdict(serving.offers[0])), file=replies, flush=True)
    for line in commands:
        print(obey(pool, line.split()), file=replies, flush=True)
    serving.close()


class StandIn:
    """Starts the process and speaks to it; `peer` is what a roster would say of it."""

    process: subprocess.Popen[str]
    peer: PeerInfo

    def __init__(
        self, kind: str, folder: Path, *, layout: KVLayout, num_blocks: int, shared: bool | None = None
    ) -> None:
        """`kind` is shm or tcp. Raises TransferError when the process does not come up."""
        epoch = new_epoch()
        arguments = [kind, str(folder), str(num_blocks), str(layout.block_bytes), epoch]
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, *arguments, str(shared), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        first_line = self._line()
        if not first_line:
            raise TransferError("the stand-in process did not start", reason="peer_gone")
        self.peer = PeerInfo(
            name="stand-in",
            role="prefill",
            epoch=epoch,
            endpoint="",
            layout=layout,
            num_blocks=num_blocks,
            links=(LinkOffer(**json.loads(first_line)),),
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
