"""The bytes that each token stands for.

Text is put together from bytes, not from decoded strings: a token may hold part of a character, and only bytes can be
joined without looking back. Where all bytes make valid UTF-8 the result equals `tokenizers`' own decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import Tokenizer


class UnsupportedTokenizer(Exception):
    """The tokenizer's decoder is of a kind that cannot be streamed; the model cannot be served."""


def _byte_alphabet() -> dict[str, int]:
    """The printable characters by which byte-level BPE writes bytes: GPT-2's table, which tokenizer files share."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    table.update({chr(0x100 + position): byte for position, byte in enumerate(others)})
    return table


class Pieces:
    """Bytes by token id, worked out on first use.

    `leading_spaces` is how many spaces decoding takes off the very start of a text (SentencePiece puts one there).
    """

    def __init__(self, tokenizer: Tokenizer, decoder: Mapping[str, Any] | None) -> None:
        self._tokenizer = tokenizer
        self._special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._known: dict[int, bytes] = {}
        self.leading_spaces = 0
        self._to_bytes = self._compile(decoder)

    def text(self, token_id: int) -> bytes:
        """What the token adds to the text; nothing for special tokens and for ids without a token."""
        return b"" if token_id in self._special else self.label(token_id)

    def label(self, token_id: int) -> bytes:
        """What to show of the token in log-probabilities: special tokens by their name."""
        piece = self._known.get(token_id)
        if piece is None:
            token = self._tokenizer.id_to_token(token_id)
            piece = b"" if token is None else self._to_bytes(token)
            self._known[token_id] = piece
        return piece

    def _compile(self, decoder: Mapping[str, Any] | None) -> Callable[[str], bytes]:
        steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        kinds = [step["type"] for step in steps]
        if "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}:
            return _byte_level
        if not kinds or set(kinds) - {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
            raise UnsupportedTokenizer(f"cannot stream text of a tokenizer with the decoder {kinds or None}")
        replaced = [_replacement(step) for step in steps if step["type"] in ("Replace", "Metaspace")]
        for step in steps:
            if step["type"] == "Strip" and step["content"] == " ":
                self.leading_spaces = step["start"]
            elif step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never":
                self.leading_spaces = 1
        byte_fallback = "ByteFallback" in kinds

        def to_bytes(token: str) -> bytes:
            if byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes.fromhex(token[3:5])
            for old, new in replaced:
                token = token.replace(old, new)
            return token.encode()

        return to_bytes


_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:
        # An added token, which is written as it is.
        return token.encode()


def _replacement(step: Mapping[str, Any]) -> tuple[str, str]:
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    pattern = step["pattern"]
    if "String" not in pattern:
        raise UnsupportedTokenizer("cannot stream text of a tokenizer whose decoder replaces by regular expression")
    return pattern["String"], step["content"]
