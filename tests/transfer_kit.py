"""Two pools and a link between them in one process, and small makers of runs, reads and targets."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import zmq

from kv_transfer.links import BlockRead, Reader
from kv_transfer.offers import Exports, export_pool, openers
from kv_transfer.plan import Target
from kv_transfer.pool import Pool
from pdserve.channel import new_epoch
from pdserve.layout import KVLayout
from pdserve.messages import Key, PeerInfo, Published, Run
from pdserve.worker.device_memory import DeviceMemory

LAYOUT = KVLayout(model="m", dtype="float32", num_layers=2, num_kv_heads=1, head_dim=8, block_size=4)
KEY = Key(request="r", attempt=1)
NUM_BLOCKS = 64


def make_pool(shared=False, num_blocks=NUM_BLOCKS, *, on_device=False):
    """With `on_device` in memory that links may only copy from and to, as a GPU's."""
    allocate = (lambda size: DeviceMemory(size, "cpu")) if on_device else None
    return Pool(
        num_blocks=num_blocks, block_bytes=LAYOUT.block_bytes, epoch=new_epoch(), shared=shared, allocate=allocate
    )


def peer_of(pool, offers, layout=LAYOUT):
    return PeerInfo(
        name="owner",
        role="prefill",
        epoch=pool.header.epoch,
        endpoint="",
        layout=layout,
        num_blocks=pool.num_blocks,
        links=tuple(offers),
    )


def fill(pool, *blocks):
    """Each block holds its own number in every byte."""
    for block in blocks:
        pool.write(block, np.full(pool.block_bytes, block, dtype=np.uint8))


def content(pool, block):
    """The one value that every byte of a block has, or None."""
    data = pool.read(block)
    return int(data[0]) if (data == data[0]).all() else None


def read_of(owner, sources, destinations, name="read"):
    """Of blocks as they are now."""
    return BlockRead(
        read_id=name,
        sources=tuple(sources),
        generations=owner.header.generations(sources),
        destinations=tuple(destinations),
    )


def finish(reader, timeout_s=10.0):
    """Poll until every read has its result."""
    results = []
    poller = zmq.Poller()
    if reader.waitable is not None:
        poller.register(reader.waitable, zmq.POLLIN)
    end_s = time.monotonic() + timeout_s
    while reader.num_pending and time.monotonic() < end_s:
        results += reader.poll(0.01)
        if reader.num_pending and reader.waitable is not None:
            poller.poll(20)
    return results


@dataclass
class Pair:
    owner: Pool
    local: Pool
    exports: Exports
    peer: PeerInfo
    reader: Reader
    open: object = field(repr=False)

    def read(self, sources, destinations, name="read"):
        self.reader.start(read_of(self.owner, sources, destinations, name))
        return finish(self.reader)


@contextmanager
def linked(kind, folder, shared=False, *, on_device=False):
    """`kind` is shm or tcp; nothing is pending at the end, and everything closes."""
    owner, local = make_pool(shared, on_device=on_device), make_pool(on_device=on_device)
    context = zmq.Context()
    exports = export_pool(owner, kinds=kind, folder=folder / "run")
    peer = peer_of(owner, exports.offers)
    opener = openers(local, kinds=kind, context=context, slice_s=0.002)[kind]
    reader = opener(peer.links[0], peer)
    try:
        yield Pair(owner, local, exports, peer, reader, lambda peer=peer: opener(peer.links[0], peer))
    finally:
        reader.close()
        exports.close()
        context.term()
        owner.close()
        local.close()


def run(first_position, num_tokens, blocks, generations=None):
    return Run(
        first_position=first_position,
        num_tokens=num_tokens,
        blocks=tuple(blocks),
        generations=tuple(generations or [1] * len(blocks)),
    )


def published(*runs, is_last=False, key=KEY):
    return Published(key=key, runs=tuple(runs), is_last=is_last)


def target(num_tokens, held=0, table=None, block_size=4):
    """`held` leading blocks are here already; the table is 100, 101, ... unless given."""
    num_blocks = -(-num_tokens // block_size)
    return Target(
        num_tokens=num_tokens,
        first_missing=held * block_size,
        block_size=block_size,
        table=tuple(table or range(100, 100 + num_blocks)),
        num_source_blocks=NUM_BLOCKS,
    )
