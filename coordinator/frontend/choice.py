"""One answer growing token by token: text, stop strings, log probabilities, and how it ended.

Owns what of a sample may be shown and what its last token was; writes no JSON. Invariant: the same tokens give the
same text however they were grouped, and nothing after the end is ever shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.frontend.detokenizer import TokenTable, new_detokenizer
from coordinator.frontend.envelope import internal_error
from coordinator.frontend.stops import StopMatcher
from pdserve.messages import Output, SampleEnded, TokenText
from pdserve.request import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInfo:
    """A counted token, and where its text begins in the answer."""

    token: int
    offset: int  # characters
    logprob: float | None
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What has become known since the piece before."""

    text: str
    tokens: tuple[TokenInfo, ...]


class Choice:
    def __init__(self, index: int, *, table: TokenTable, sampling: Sampling, stop: Sequence[str]) -> None:
        self.index = index
        self.num_generated = 0
        self.finish_reason: str | None = None
        self.stop_found_at: int | None = None  # the token count that completed a stop string
        self._sampling = sampling
        self._detokenizer = new_detokenizer(table)
        self._matcher = StopMatcher(stop)
        self._num_chars = 0  # decoded so far, shown or not
        self._text: list[str] = []
        self._tokens: list[TokenInfo] = []

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None

    @property
    def has_news(self) -> bool:
        return bool(self._text)

    def push(self, output: Output) -> None:
        """Tokens of the core; ones already seen are skipped, and a gap is a broken promise."""
        if output.first > self.num_generated and not self.is_over:
            raise internal_error()
        for token in output.tokens[max(self.num_generated - output.first, 0) :]:
            if self.is_over:
                return
            self._push(token)

    def end(self, ended: SampleEnded) -> None:
        """The core's word on how the sample ended, unless a stop string ended it before."""
        if self.is_over:
            return
        if ended.num_generated != self.num_generated or ended.reason not in ("stop", "length"):
            raise internal_error()
        self._finish(ended.reason)

    def take(self) -> Piece:
        """News since the last time."""
        piece = Piece(text="".join(self._text), tokens=tuple(self._tokens))
        self._text.clear()
        self._tokens.clear()
        return piece

    def _push(self, token: TokenText) -> None:
        self.num_generated += 1
        self._tokens.append(TokenInfo(token=token.token, offset=self._num_chars, logprob=token.logprob, top=token.top))
        if self._sampling.finish_reason(token.token, self.num_generated) == "stop":
            return  # the token that ends an answer is not part of its text
        self._show(self._detokenizer.push(token.token))

    def _show(self, text: str) -> None:
        self._num_chars += len(text)
        shown, is_stop = self._matcher.push(text, may_stop=self.num_generated >= self._sampling.min_tokens)
        if shown:
            self._text.append(shown)
        if is_stop:
            self.finish_reason = "stop"
            self.stop_found_at = self.num_generated

    def _finish(self, reason: str) -> None:
        self._show(self._detokenizer.flush())
        if self.is_over:  # the very last characters completed a stop string
            return
        rest = self._matcher.flush()
        if rest:
            self._text.append(rest)
        self.finish_reason = reason
