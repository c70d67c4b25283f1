"""Pools of one host, the owner's side: who may read this process's pool, and where it lies.

Owns the Unix socket (in a 0700 folder) that hands out the header's memfd and the pool's address; copies nothing.
Invariant: descriptors go only to processes of the same user, and whatever a client sends or withholds is counted and
forgotten, never waited for beyond half a second.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import select
import socket
import stat
import struct
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kv_transfer.pool import Pool
from pdserve.codec import MalformedError, Registry
from pdserve.errors import ConfigError
from pdserve.messages import LinkOffer

log = logging.getLogger(__name__)

MAX_PACKET_BYTES = 4096
PROBE_BYTES = 16
_CLIENT_TIMEOUT_S = 0.5
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_MAX_PATH_BYTES = 107


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Reader -> owner: where is your pool?"""

    epoch: str  # the one the reader knows, for the owner's count of mistaken readers


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOut:
    """Owner -> reader, with the header's descriptor and, where the pool is a memfd, the pool's."""

    epoch: str
    address: int  # of block 0 in the owner
    num_blocks: int  # of the pool proper
    total_blocks: int  # test and scratch blocks included
    block_bytes: int
    has_pool_fd: bool
    probe_address: int  # where `probe` lies in the owner's memory: shows that the right process is being read
    probe: bytes


REGISTRY = Registry(version=1, tags={1: Ask, 2: HandOut})


def peer_credentials(client: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the other end, as the kernel knows them; the pid is 0 when it lives in another PID namespace."""
    pid, uid, _ = _CREDENTIALS.unpack(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def private_folder(folder: Path) -> Path:
    """The folder, made if need be; raises ConfigError unless it is this user's alone."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(f"{folder} must be a folder of this user with mode 0700")
    return folder


class ShmExport:
    """Serves the hand-out from a daemon thread until closed."""

    def __init__(self, pool: Pool, *, folder: Path, name: str) -> None:
        """Listens on `folder/name.sock`. Raises ConfigError when the folder is unsafe or the path too long."""
        self._pool = pool
        self._path = private_folder(folder) / f"{name}.sock"
        if len(os.fsencode(self._path)) > _MAX_PATH_BYTES:
            raise ConfigError(f"{self._path} is longer than a Unix socket's {_MAX_PATH_BYTES} bytes")
        self._probe = np.frombuffer(secrets.token_bytes(PROBE_BYTES), dtype=np.uint8).copy()
        self._num_ignored = 0
        self._path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self._path))
        self._listener.listen(64)
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="shm-export", daemon=True)
        self._thread.start()

    @property
    def offer(self) -> LinkOffer:
        return LinkOffer(kind="shm", address=str(self._path))

    @property
    def num_ignored(self) -> int:
        return self._num_ignored

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        os.write(self._wake_write, b"x")
        self._thread.join()
        self._listener.close()
        self._path.unlink(missing_ok=True)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poller.poll()]
            if self._wake_read in ready:
                return
            try:
                client, _ = self._listener.accept()
                with client:
                    client.settimeout(_CLIENT_TIMEOUT_S)
                    self._answer(client)
            except (OSError, MalformedError) as error:
                self._num_ignored += 1
                if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                    log.warning("cannot hand out the KV pool: %s", error)
                    select.select([self._wake_read], [], [], _CLIENT_TIMEOUT_S)  # descriptors may come back

    def _answer(self, client: socket.socket) -> None:
        _, uid = peer_credentials(client)
        if uid != os.geteuid():
            raise MalformedError(f"user {uid} asked for the KV pool")
        if not isinstance(REGISTRY.decode(client.recv(MAX_PACKET_BYTES)), Ask):
            raise MalformedError("not a question")
        pool, memory = self._pool, self._pool.host
        assert memory is not None
        reply = HandOut(
            epoch=pool.header.epoch,
            address=memory.address,
            num_blocks=pool.num_blocks,
            total_blocks=pool.total_blocks,
            block_bytes=pool.block_bytes,
            has_pool_fd=memory.fd is not None,
            probe_address=self._probe.ctypes.data,
            probe=self._probe.tobytes(),
        )
        fds = [pool.header.fd] if memory.fd is None else [pool.header.fd, memory.fd]
        socket.send_fds(client, [REGISTRY.encode(reply)], fds)
