"""Tokens to text, as they come."""

from __future__ import annotations

import codecs

from tidelane.engine.http.pieces import Pieces

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Text of a growing list of tokens. A split character is held until it is whole; `finish` flushes what is left.

    What `feed` and `finish` return, joined, does not depend on when they were called. Bytes that are no UTF-8 become
    U+FFFD. `at_start` says that the first token begins the text, where SentencePiece's leading space is dropped.
    """

    def __init__(self, pieces: Pieces, *, at_start: bool = False) -> None:
        self._pieces = pieces
        self._decoder = _UTF8(errors="replace")
        self._spaces_to_drop = pieces.leading_spaces if at_start else 0

    def feed(self, token_id: int) -> str:
        return self._strip(self._decoder.decode(self._pieces.text(token_id)))

    def finish(self) -> str:
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if not self._spaces_to_drop or not text:
            return text
        stripped = text.lstrip(" ")
        dropped = min(len(text) - len(stripped), self._spaces_to_drop)
        self._spaces_to_drop = 0 if stripped else self._spaces_to_drop - dropped
        return text[dropped:]
