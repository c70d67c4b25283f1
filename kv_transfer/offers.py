"""Which links a worker offers for its pool, and how it opens those of others.

Owns the meaning of `--kv-link`; the links own the rest. Invariant: with a link named, no other one is offered or
opened; with auto, shared memory comes first and what falls short of it is said aloud.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import zmq

from kv_transfer.links import Export, Opener, Reader
from kv_transfer.pool import Pool
from kv_transfer.shm import ShmExport
from kv_transfer.shm_reader import open_shm
from kv_transfer.syscalls import allow_reads_by
from kv_transfer.tcp import TcpExport
from kv_transfer.tcp_reader import open_tcp
from pdserve.errors import ConfigError
from pdserve.messages import LinkOffer, PeerInfo

KINDS = {"auto": ("shm", "tcp"), "shm": ("shm",), "tcp": ("tcp",), "none": ()}


class Exports:
    """What one pool is served by, until closed. `notes` are to be said aloud at start."""

    def __init__(self, serving: list[Export], notes: list[str], context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._serving = serving
        self._context = context
        self.notes = tuple(notes)

    @property
    def offers(self) -> tuple[LinkOffer, ...]:
        return tuple(each.offer for each in self._serving)

    @property
    def num_ignored(self) -> int:
        """Requests by strangers or nonsense, all links together."""
        return sum(each.num_ignored for each in self._serving)

    def close(self) -> None:
        for each in self._serving:
            each.close()
        self._context.term()


def _kinds(pool: Pool, kinds: str) -> tuple[str, ...]:
    """Those that can reach the pool's memory: what is on a device travels over tcp, through this machine's memory.

    Raises ConfigError when none is left.
    """
    usable = tuple(kind for kind in KINDS[kinds] if kind == "tcp" or pool.host is not None)
    if KINDS[kinds] and not usable:
        raise ConfigError(f"--kv-link {kinds} cannot reach a KV pool on a device; use --kv-link tcp or auto")
    return usable


def export_pool(pool: Pool, *, kinds: str, folder: Path, reader_pid: int = 0) -> Exports:
    """Serve `pool` on the links that `kinds` (auto, shm, tcp or none) names; readers descend from `reader_pid`.

    Raises ConfigError when the folder is not private or no port is free.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    serving: list[Export] = []
    notes: list[str] = []
    if "shm" in _kinds(pool, kinds):
        if reader_pid > 0:
            allow_reads_by(reader_pid)
        if pool.why_shared:
            notes.append(
                f"KV pool is a memfd of {pool.memory.page_kind} pages, slower to compute on: {pool.why_shared}"
            )
        serving.append(ShmExport(pool, folder=folder, name=f"kv-{os.getpid()}"))
    if "tcp" in _kinds(pool, kinds):
        serving.append(TcpExport(pool, context=context, bind="tcp://127.0.0.1:*"))
    return Exports(serving, notes, context)


def openers(pool: Pool, *, kinds: str, context: zmq.Context[zmq.Socket[bytes]], slice_s: float) -> Mapping[str, Opener]:
    """How to open the links that `kinds` names, for reads into `pool`."""

    def shm(offer: LinkOffer, peer: PeerInfo) -> Reader:
        return open_shm(offer, peer, pool, slice_s=slice_s)

    def tcp(offer: LinkOffer, peer: PeerInfo) -> Reader:
        return open_tcp(offer, peer, pool, context=context)

    every: dict[str, Opener] = {"shm": shm, "tcp": tcp}
    return {kind: every[kind] for kind in _kinds(pool, kinds)}
