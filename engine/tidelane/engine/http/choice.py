"""One sequence's output on its way to the client: tokens in, text out, with all that belongs to a token."""

from __future__ import annotations

from dataclasses import dataclass

from tidelane.engine.channel import Tokens
from tidelane.engine.http.detokenizer import Detokenizer
from tidelane.engine.http.pieces import Pieces
from tidelane.engine.http.stop_strings import StopStrings
from tidelane.engine.request import FinishReason, NewToken, Request, TokenLogprob


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token as log-probabilities show it. `offset` counts characters from the start of the choice's text."""

    piece: bytes
    logprob: TokenLogprob | None  # None: the prompt's first token, which nothing predicts
    offset: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of a choice. `tokens` is empty unless log-probabilities were asked for."""

    index: int
    text: str
    tokens: tuple[TokenText, ...]
    finish: FinishReason | None


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt, to be shown before the output. `text` is the client's own, or None to decode the tokens."""

    text: str | None


class Choice:
    """Collects one request's tokens; `take` hands out what may be shown and was not yet.

    Text waits here until it is taken, so a slow reader gets fewer and larger deltas; `unread_tokens` is how far behind
    it is. Log-probabilities are handed out with the text of their token.
    """

    def __init__(
        self, index: int, request: Request, pieces: Pieces, stops: tuple[str, ...], echo: Echo | None = None
    ) -> None:
        self.index = index
        self.request = request
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.unread_tokens = 0
        self.finish: FinishReason | None = None
        self._pieces = pieces
        self._echo = echo
        self._detokenizer = Detokenizer(pieces)
        self._stops = StopStrings(stops)
        self._shown: list[str] = []
        self._shown_chars = 0
        self._decoded_chars = 0
        self._pending_tokens: list[tuple[TokenText, int]] = []  # with the offset where the token's text ends
        self._started = False
        self._finish_taken = False

    def add(self, message: Tokens) -> None:
        if not self._started:
            self._started = True
            self._start(message)
        for position, new in enumerate(message.new):
            last = position == len(message.new) - 1
            self._add(new, ends=last and message.finish is FinishReason.STOP)
            if self._stops.hit is not None:
                break
        if message.finish is not None:
            self._flush()
        self.finish = message.finish
        if self._stops.hit is not None:
            self.finish = FinishReason.STOP
            self._pending_tokens = [entry for entry in self._pending_tokens if entry[0].offset < self._shown_chars]

    def take(self) -> Delta | None:
        """What is new since the last call; None if there is nothing to show."""
        self.unread_tokens = 0
        ending = self.finish is not None and not self._finish_taken
        if not self._shown and not ending:
            return None
        text = "".join(self._shown)
        ready = [token for token, end in self._pending_tokens if ending or end <= self._shown_chars]
        del self._pending_tokens[: len(ready)]
        self._shown.clear()
        self._finish_taken = ending
        return Delta(self.index, text, tuple(ready), self.finish)

    def _start(self, message: Tokens) -> None:
        self.cached_tokens = message.cached_tokens
        if self._echo is None:
            return
        detokenizer = Detokenizer(self._pieces, at_start=True)
        texts = [detokenizer.feed(token_id) for token_id in self.request.prompt]
        offset = 0
        for token_id, text, logprob in zip(self.request.prompt, texts, message.prompt_logprobs or (), strict=False):
            # The prompt is shown at once, so its tokens wait for no text.
            self._pending_tokens.append((TokenText(self._pieces.label(token_id), logprob, offset), 0))
            offset += len(text)
        if self._echo.text is None:
            # The output goes on where the prompt ends, be it in the middle of a character.
            self._detokenizer = detokenizer
        prompt = "".join(texts) if self._echo.text is None else self._echo.text
        self._decoded_chars = len(prompt)
        self._show(prompt)

    def _add(self, new: NewToken, *, ends: bool) -> None:
        self.completion_tokens += 1
        self.unread_tokens += 1
        if ends and new.token_id in self.request.stop_token_ids:
            return
        offset = self._decoded_chars
        text = self._detokenizer.feed(new.token_id)
        self._decoded_chars += len(text)
        if new.logprob is not None:
            entry = TokenText(self._pieces.label(new.token_id), new.logprob, offset)
            self._pending_tokens.append((entry, self._decoded_chars))
        self._show(self._stops.feed(text))

    def _flush(self) -> None:
        """No more tokens come: half a character stays half, and half a stop string is just text."""
        rest = self._detokenizer.finish()
        self._decoded_chars += len(rest)
        self._show(self._stops.feed(rest))
        self._show(self._stops.finish())

    def _show(self, text: str) -> None:
        if text:
            self._shown.append(text)
            self._shown_chars += len(text)
