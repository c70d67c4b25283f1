"""Sessions over ZeroMQ: a `Hub` that many processes connect to, and the `Link` each of them holds.

Owns the sockets and one `Session` per pair of epochs; knows no policy. Identity = epoch; sends never block: what the
socket does not take now is sent again later, and a full window is the caller's back-pressure (law 11).
Invariant: `receive` never raises on what a peer sent; what is no frame of this protocol is dropped (a hub counts it).
"""

from __future__ import annotations

import collections
import secrets
import time
from typing import Any

import msgpack
import zmq

from pdserve import messages
from pdserve.codec import MAX_BYTES, MalformedError
from pdserve.session import Frame, Session

DATA, RAW, RESET = 0, 1, 2
KEEPALIVE_S = 1.0  # a link that is otherwise quiet speaks this often, so that a replaced hub can answer with a reset
MAX_DEAD_EPOCHS = 4096


def new_epoch() -> str:
    """A name for one life of one process; 96 random bits."""
    return secrets.token_hex(12)


def _pack(kind: int, source: str, target: str, frame: Frame) -> list[bytes]:
    fields = [messages.PROTOCOL_VERSION, kind, source, target, frame.sequence, frame.acknowledged]
    return [msgpack.packb(fields), frame.payload]


def _unpack(parts: list[bytes]) -> tuple[int, str, str, Frame]:
    """(kind, source, target, frame); raises `MalformedError`."""
    if len(parts) != 2:
        raise MalformedError(f"{len(parts)} parts")
    try:
        fields = msgpack.unpackb(parts[0], max_ext_len=0, max_str_len=128, max_array_len=6)
    except (ValueError, msgpack.UnpackException) as error:
        raise MalformedError(str(error)) from None
    if type(fields) is not list or [type(x) for x in fields] != [int, int, str, str, int, int]:
        raise MalformedError("not a header")
    version, kind, source, target, sequence, acknowledged = fields
    if version != messages.PROTOCOL_VERSION:
        raise MalformedError(f"protocol version {version}, not {messages.PROTOCOL_VERSION}")
    if min(sequence, acknowledged) < 0 or kind not in (DATA, RAW, RESET):
        raise MalformedError("not a header")
    return kind, source, target, Frame(sequence=sequence, acknowledged=acknowledged, payload=parts[1])


BARE = Frame(sequence=0, acknowledged=0, payload=b"")


def _configure(socket: zmq.Socket[bytes], identity: str | None = None) -> None:
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 10_000
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
    if identity is not None:
        socket.setsockopt(zmq.IDENTITY, identity.encode())
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)


def _try_send(socket: zmq.Socket[bytes], parts: list[bytes]) -> bool:
    try:
        socket.send_multipart(parts, flags=zmq.NOBLOCK)
    except zmq.ZMQError as error:
        if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
            return False
        raise
    return True


def _try_receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    try:
        return socket.recv_multipart(flags=zmq.NOBLOCK)
    except zmq.Again:
        return None


class Hub:
    """The bound side. `bind` is a ZeroMQ endpoint; tcp with port 0 or * picks a port, see `endpoint`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], bind: str, epoch: str, *, window: int = 8192) -> None:
        self.epoch = epoch
        self.ignored: collections.Counter[str] = collections.Counter()  # received and not acted on, by reason
        self.socket = context.socket(zmq.ROUTER)
        _configure(self.socket)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.endpoint = self.bind(bind)
        self._window = window
        self._sessions: dict[str, Session] = {}
        self._heard_s: dict[str, float] = {}
        self._dead: collections.OrderedDict[str, None] = collections.OrderedDict()

    def bind(self, endpoint: str) -> str:
        """Listen there too; returns the endpoint with the port that was picked. Raises `zmq.ZMQError`."""
        self.socket.bind(endpoint)
        return self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def peers(self) -> list[str]:
        return list(self._sessions)

    def send(self, peer: str, message: Any) -> bool:
        """Queue `message` for `peer`; False when it is unknown or its window is full: nothing was queued."""
        session = self._sessions.get(peer)
        now_s = time.monotonic()
        frame = None if session is None else session.send(messages.encode(message), now_s)
        if session is None or frame is None:
            return False
        self._transmit(peer, session, frame, now_s)
        return True

    def silent_s(self, peer: str) -> float:
        """Seconds since anything came from `peer`; links speak at least every `KEEPALIVE_S`."""
        return time.monotonic() - self._heard_s.get(peer, 0.0)

    def can_send(self, peer: str) -> bool:
        session = self._sessions.get(peer)
        return session is not None and session.can_send()

    def expect(self, peer: str) -> None:
        """Open a session to a peer that has not spoken yet; what is sent waits until it connects."""
        if peer not in self._dead:
            self._sessions.setdefault(peer, Session(window=self._window))

    def forget(self, peer: str) -> None:
        """The peer's epoch is dead: whatever it says from now on is answered with a reset."""
        self._sessions.pop(peer, None)
        self._heard_s.pop(peer, None)
        self._dead[peer] = None
        while len(self._dead) > MAX_DEAD_EPOCHS:
            self._dead.popitem(last=False)

    def receive(self, at_most: int = 1000) -> list[tuple[str, Any, bytes | None]]:
        """(epoch, message, None) of sessions, in order; (source, message, identity) of raw messages."""
        received: list[tuple[str, Any, bytes | None]] = []
        for _ in range(at_most):
            parts = _try_receive(self.socket)
            if parts is None:
                break
            try:
                kind, source, target, frame = _unpack(parts[1:])
                if kind == RAW:
                    received.append((source, messages.decode(frame.payload), parts[0]))
                elif kind == DATA:
                    self._on_data(parts[0], source, target, frame, received)
            except MalformedError:
                self.ignored["malformed"] += 1
        return received

    def tick(self) -> float | None:
        """Send what is due; returns when to call again, None when there is nothing to wait for."""
        now_s = time.monotonic()
        for peer, session in self._sessions.items():
            for frame in session.due(now_s):
                if not self._transmit(peer, session, frame, now_s):
                    break
        times = [t for t in (session.next_due_s() for session in self._sessions.values()) if t is not None]
        return min(times) if times else None

    def close(self) -> None:
        self.socket.close()

    def _on_data(self, identity: bytes, source: str, target: str, frame: Frame, received: list[Any]) -> None:
        if source.encode() != identity:
            self.ignored["identity"] += 1
            return
        if source in self._dead or (target and target != self.epoch):
            _try_send(self.socket, [identity, *_pack(RESET, self.epoch, source, BARE)])
            return
        session = self._sessions.get(source)
        if session is None:
            if target and (frame.acknowledged or frame.sequence > 1):  # it believes in a session that is not here
                _try_send(self.socket, [identity, *_pack(RESET, self.epoch, source, BARE)])
                return
            session = self._sessions[source] = Session(window=self._window)
        now_s = self._heard_s[source] = time.monotonic()
        payload = session.receive(frame, now_s)
        if payload is not None:
            received.append((source, messages.decode(payload), None))

    def _transmit(self, peer: str, session: Session, frame: Frame, now_s: float) -> bool:
        if _try_send(self.socket, [peer.encode(), *_pack(DATA, self.epoch, peer, frame)]):
            return True
        session.blocked(now_s)
        return False


class Link:
    """The connecting side: one session with the process behind `endpoint`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, epoch: str, *, remote: str = "") -> None:
        self.epoch = epoch
        self.remote = remote  # the other side's epoch, once it has spoken
        self.is_stale = False  # the other side was replaced, or has declared this epoch dead
        self.socket = context.socket(zmq.DEALER)
        _configure(self.socket, epoch)
        self.socket.connect(endpoint)
        self._session = Session()
        self._sent_s = 0.0

    def send(self, message: Any) -> bool:
        """Queue `message`; False when the window is full or the link is stale: nothing was queued."""
        now_s = time.monotonic()
        frame = None if self.is_stale else self._session.send(messages.encode(message), now_s)
        if frame is None:
            return False
        self._transmit(frame, now_s)
        return True

    def can_send(self) -> bool:
        return not self.is_stale and self._session.can_send()

    def receive(self, at_most: int = 1000) -> list[Any]:
        received = []
        for _ in range(at_most):
            parts = _try_receive(self.socket)
            if parts is None:
                break
            try:
                kind, source, target, frame = _unpack(parts)
                if kind == RESET and target == self.epoch:
                    self.is_stale = True
                elif kind == DATA and target == self.epoch and self._is_remote(source):
                    payload = self._session.receive(frame, time.monotonic())
                    if payload is not None:
                        received.append(messages.decode(payload))
            except MalformedError:
                continue
        return received

    def tick(self) -> float | None:
        """Send what is due; returns when to call again (monotonic seconds), None once stale."""
        if self.is_stale:
            return None
        now_s = time.monotonic()
        frames = self._session.due(now_s)
        if not frames and now_s >= self._sent_s + KEEPALIVE_S:
            frames = [self._session.acknowledgement()]
        for frame in frames:
            if not self._transmit(frame, now_s):
                break
        due_s = self._session.next_due_s()
        keepalive_s = max(self._sent_s + KEEPALIVE_S, now_s + KEEPALIVE_S / 10)
        return keepalive_s if due_s is None else min(due_s, keepalive_s)

    def close(self) -> None:
        self.socket.close()

    def _is_remote(self, source: str) -> bool:
        if not self.remote:
            self.remote = source
        elif source != self.remote:
            self.is_stale = True
        return source == self.remote

    def _transmit(self, frame: Frame, now_s: float) -> bool:
        if _try_send(self.socket, _pack(DATA, self.epoch, self.remote, frame)):
            self._sent_s = now_s
            return True
        self._session.blocked(now_s)
        return False


class RawLink:
    """Unacknowledged messages to a hub, for heartbeats: each may be lost, the next one is as good."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, source: str) -> None:
        self._source = source
        self.socket = context.socket(zmq.DEALER)
        _configure(self.socket, f"{source}/{secrets.token_hex(4)}")
        self.socket.setsockopt(zmq.SNDHWM, 10)
        self.socket.connect(endpoint)

    def send(self, message: Any) -> bool:
        frame = Frame(sequence=0, acknowledged=0, payload=messages.encode(message))
        return _try_send(self.socket, _pack(RAW, self._source, "", frame))

    def close(self) -> None:
        self.socket.close()
