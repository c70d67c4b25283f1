"""The workers the core knows: one record per live epoch, and which epochs are dead.

Owns registration, draining and what was learned about each worker's speed; the ledger owns what is promised on it.
Invariant: a name has at most one live epoch, and an epoch once dead never lives again (law 7).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from pdserve.layout import KVLayout
from pdserve.messages import Heartbeat, Key, PeerInfo, WorkerHello

State = Literal["ready", "draining", "drained"]

_LEARN = 0.2  # weight of a new observation
_FULL_WEIGHT_TOKENS = 512  # a shorter prompt says less about the rate
_MAX_DEAD = 4096


@dataclass(slots=True, kw_only=True)
class Worker:
    hello: WorkerHello
    state: State = "ready"
    prefill_rate: float  # tokens per second
    sample_s: float = 0.0005  # what one more sample adds to a decode step
    grace_s: float = 2.0  # how long what it reports may differ from what the core thinks
    heartbeat: Heartbeat | None = None
    strangers: dict[Key, float] = field(default_factory=dict)  # reported without business here, and since when
    missing: dict[Key, int] = field(default_factory=dict)  # expected, and in how many heartbeats not reported

    @property
    def info(self) -> PeerInfo:
        return self.hello.info

    @property
    def name(self) -> str:
        return self.hello.info.name

    @property
    def epoch(self) -> str:
        return self.hello.info.epoch

    @property
    def role(self) -> str:
        return self.hello.info.role

    @property
    def num_blocks(self) -> int:
        """That requests can get: all but the null block."""
        return self.hello.info.num_blocks - 1

    def learn_prefill(self, num_tokens: int, seconds: float) -> None:
        if num_tokens > 0 and seconds > 0:
            weight = _LEARN * min(1.0, num_tokens / _FULL_WEIGHT_TOKENS)
            self.prefill_rate += weight * (num_tokens / seconds - self.prefill_rate)

    def learn_step(self, seconds: float, num_samples: int) -> None:
        if seconds > 0 and num_samples > 0:
            self.sample_s += _LEARN * (seconds / num_samples - self.sample_s)


class Registry:
    def __init__(self) -> None:
        self._live: dict[str, Worker] = {}
        self._dead: set[str] = set()
        self._dead_order: deque[str] = deque()

    def add(self, hello: WorkerHello, grace_s: float) -> Worker:
        worker = Worker(hello=hello, prefill_rate=max(1.0, hello.prefill_tokens_per_s), grace_s=grace_s)
        self._live[worker.epoch] = worker
        return worker

    def lose(self, epoch: str) -> Worker | None:
        """The worker that has just died; None if it was not alive. Either way it is dead from now on."""
        if epoch not in self._dead:
            self._dead.add(epoch)
            self._dead_order.append(epoch)
            if len(self._dead_order) > _MAX_DEAD:
                self._dead.discard(self._dead_order.popleft())
        return self._live.pop(epoch, None)

    def is_dead(self, epoch: str) -> bool:
        return epoch in self._dead

    def get(self, epoch: str) -> Worker | None:
        return self._live.get(epoch)

    def named(self, name: str) -> Worker | None:
        return next((worker for worker in self._live.values() if worker.name == name), None)

    def live(self, role: str = "") -> list[Worker]:
        return [worker for worker in self._live.values() if role in ("", worker.role)]

    def routable(self, role: str) -> list[Worker]:
        return [worker for worker in self._live.values() if worker.role == role and worker.state == "ready"]

    def roster(self) -> tuple[PeerInfo, ...]:
        return tuple(worker.info for worker in self._live.values())

    @property
    def layout(self) -> KVLayout | None:
        """The one layout of all live pools."""
        return next((worker.info.layout for worker in self._live.values()), None)

    @property
    def max_model_len(self) -> int:
        """The context that every live worker serves; 0 without workers."""
        return min((worker.hello.max_model_len for worker in self._live.values()), default=0)

    def num_blocks(self, role: str) -> int:
        """Of the largest live pool of a role."""
        return max((worker.num_blocks for worker in self.live(role)), default=0)
