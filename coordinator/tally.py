"""Counters and histograms of the core, and their text.

Owns numbers with bounded labels; reads no clock. Invariant: counters never fall, and a histogram's last bucket counts
every observation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

Labels = tuple[tuple[str, str], ...]
Row = tuple[str, Labels, float]  # name, labels, value

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self._counts)

    def rows(self, name: str, labels: Labels) -> Iterable[Row]:
        seen = 0
        for bound, count in zip((*self._bounds, None), self._counts, strict=True):
            seen += count
            yield f"{name}_bucket", (*labels, ("le", "+Inf" if bound is None else f"{bound:g}")), seen
        yield f"{name}_sum", labels, self.sum
        yield f"{name}_count", labels, seen


class Tally:
    def __init__(self) -> None:
        self._counters: dict[tuple[str, Labels], float] = {}
        self._histograms: dict[tuple[str, Labels], Histogram] = {}

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        key = (name, tuple(labels.items()))
        self._counters[key] = self._counters.get(key, 0) + amount

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        key = (name, tuple(labels.items()))
        if key not in self._histograms:
            self._histograms[key] = Histogram()
        self._histograms[key].observe(seconds)

    def value(self, name: str, **labels: str) -> float:
        """Of one counter, or the sum over all labels when none are given."""
        if labels:
            return self._counters.get((name, tuple(labels.items())), 0)
        return sum(value for (each, _), value in self._counters.items() if each == name)

    def families(self) -> list[tuple[str, str, list[Row]]]:
        """(name, type, rows) for each metric, in order of name."""
        found: dict[str, tuple[str, list[Row]]] = {}
        for (name, labels), value in self._counters.items():
            found.setdefault(name, ("counter", []))[1].append((name, labels, value))
        for (name, labels), histogram in self._histograms.items():
            found.setdefault(name, ("histogram", []))[1].extend(histogram.rows(name, labels))
        return [(name, kind, rows) for name, (kind, rows) in sorted(found.items())]


def text(families: Iterable[tuple[str, str, list[Row]]]) -> str:
    """Prometheus text format, version 0.0.4."""
    lines = []
    for name, kind, rows in families:
        lines.append(f"# TYPE {name} {kind}")
        for row_name, labels, value in rows:
            inner = ",".join(f'{key}="{_escape(label)}"' for key, label in labels)
            lines.append(f"{row_name}{{{inner}}} {value:.17g}" if inner else f"{row_name} {value:.17g}")
    return "\n".join(lines) + "\n"


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
