"""Stop strings over streamed text: what may be shown, and where it ends.

Owns one automaton per stop string (Knuth, Morris and Pratt, 1977), so a character costs the same however long the
text. Invariant: shown text never holds a stop string, and only a suffix that could still become one is held back.
"""

from __future__ import annotations

from collections.abc import Sequence


class _Automaton:
    """How many characters of one stop string the text seen so far ends with."""

    __slots__ = ("_fallback", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = _fallbacks(stop)

    def feed(self, char: str) -> bool:
        """Whether `char` completes the stop string; an overlapping later match is still found."""
        stop, matched = self.stop, self.matched
        if matched == len(stop):
            matched = self._fallback[matched]
        while matched and stop[matched] != char:
            matched = self._fallback[matched]
        if stop[matched] == char:
            matched += 1
        self.matched = matched
        return matched == len(stop)

    @property
    def num_open(self) -> int:
        """Length of the text's suffix that could still become the stop string."""
        return self._fallback[self.matched] if self.matched == len(self.stop) else self.matched


def _fallbacks(stop: str) -> list[int]:
    """fallbacks[k]: length of the longest proper prefix of stop[:k] that is also its suffix."""
    table = [0] * (len(stop) + 1)
    length = 0
    for end in range(1, len(stop)):
        while length and stop[end] != stop[length]:
            length = table[length]
        if stop[end] == stop[length]:
            length += 1
        table[end + 1] = length
    return table


class StopMatcher:
    """The stop string that is complete first wins; of several complete at once, the longest.

    That rule looks at characters only, so it cuts at the same place however the text was divided into tokens.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._automata = [_Automaton(stop) for stop in stops]
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """Text that may be shown now, and whether a stop string is complete.

        With `may_stop` false a complete stop string is text like any other.
        """
        if not self._automata:
            return text, False
        held = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            done = [automaton.stop for automaton in self._automata if automaton.feed(char)]
            if done and may_stop:
                self._held = ""
                return held[: end - max(map(len, done))], True
        keep = max(automaton.num_open for automaton in self._automata)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held
