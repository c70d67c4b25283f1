"""Counters of a worker as heartbeat metrics."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.messages import Metric


def metric(name: str, value: float, **labels: str) -> Metric:
    return Metric(name=name, labels=tuple(sorted(labels.items())), value=float(value))


@dataclass(slots=True)
class StepTimes:
    """How many steps, how long in all."""

    count: int = 0
    seconds: float = 0.0

    def note(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds
