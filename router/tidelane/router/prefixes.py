"""Beginnings of prompts by name, and which backend has probably kept the KV of which.

A router has no tokenizer, so that its pieces are of text: beginnings that differ in one piece share none of what
follows, since each name covers all before it. A name is a hint: the engine alone knows what its cache holds.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

# What four blocks of KV hold, of English: finer pieces cost more than they tell.
PIECE_TOKENS: Final = 64
# By count of characters English has four a token or somewhat more.
CHARS_PER_TOKEN: Final = 4
_PIECE_BYTES: Final = PIECE_TOKENS * CHARS_PER_TOKEN
# Beyond these a beginning is long enough to be told from others.
_MOST_PIECES: Final = 1024

Name = bytes


def names_of_text(text: bytes, start: bytes) -> tuple[Name, ...]:
    """Of each whole piece of `text`; `start` is what sets prompts apart that may not share, such as the model."""
    pieces = (text[at : at + _PIECE_BYTES] for at in range(0, len(text) - _PIECE_BYTES + 1, _PIECE_BYTES))
    return _chained(pieces, start)


def names_of_tokens(tokens: list[int], start: bytes) -> tuple[Name, ...]:
    pieces = (
        ",".join(map(str, tokens[at : at + PIECE_TOKENS])).encode()
        for at in range(0, len(tokens) - PIECE_TOKENS + 1, PIECE_TOKENS)
    )
    return _chained(pieces, start)


def _chained(pieces: Iterator[bytes], start: bytes) -> tuple[Name, ...]:
    names = []
    # BLAKE2b for the reason that the engine has: who writes prompts must not be able to make two of one name.
    name = hashlib.blake2b(start, digest_size=16).digest()
    for piece in islice(pieces, _MOST_PIECES):
        name = hashlib.blake2b(name + piece, digest_size=16).digest()
        names.append(name)
    return tuple(names)


def chat_text(messages: Any) -> bytes:
    """What the template will be given, with marks between messages; whatever is malformed is the engine's to refuse."""
    if not isinstance(messages, list):
        return b""
    parts: list[str] = []
    for message in messages:
        if isinstance(message, Mapping):
            parts += [str(message.get("role")), "\0", _text(message.get("content")), "\0"]
    return "".join(parts).encode(errors="replace")


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = (part.get("text") for part in content if isinstance(part, Mapping))
    return "\n".join(text for text in texts if isinstance(text, str))


class Kept:
    """The names that one backend was sent, the last used last. Holds as many as that backend can keep KV for."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._names: OrderedDict[Name, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def hold(self, most: int) -> None:
        """From now on no more than `most`."""
        self._most = most
        self._shrink()

    def sent(self, names: tuple[Name, ...]) -> None:
        # A beginning outlives what follows it, as in the engine's cache: without it the rest is of no use.
        for name in reversed(names):
            self._names[name] = None
            self._names.move_to_end(name)
        self._shrink()

    def pieces(self, names: tuple[Name, ...]) -> int:
        """How many of a prompt's first pieces are there."""
        for count, name in enumerate(names):
            if name not in self._names:
                return count
        return len(names)

    def forget(self) -> None:
        self._names.clear()

    def _shrink(self) -> None:
        while len(self._names) > self._most:
            self._names.popitem(last=False)
