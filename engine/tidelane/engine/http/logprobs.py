"""Log-probabilities in OpenAI's two shapes: chat's list of objects, and the parallel lists of completions."""

from __future__ import annotations

from collections.abc import Sequence

from tidelane.engine.http.choice import TokenText
from tidelane.engine.http.pieces import Pieces
from tidelane.engine.http.shapes import ChatLogprobs, ChatTokenLogprob, ChatTopLogprob, LegacyLogprobs

# JSON has no minus infinity; this is what OpenAI sends for a token of no probability.
_LEAST = -9999.0


def chat_logprobs(tokens: Sequence[TokenText], pieces: Pieces) -> ChatLogprobs:
    content = []
    for token in tokens:
        assert token.logprob is not None  # only the first token of an echoed prompt has none, and chats echo nothing
        top = [
            ChatTopLogprob(_text(piece), _finite(logprob), list(piece))
            for token_id, logprob in token.logprob.top
            for piece in (pieces.label(token_id),)
        ]
        content.append(ChatTokenLogprob(_text(token.piece), _finite(token.logprob.logprob), list(token.piece), top))
    return ChatLogprobs(content)


def legacy_logprobs(tokens: Sequence[TokenText], pieces: Pieces, alternatives: int) -> LegacyLogprobs:
    """`alternatives` is what the client asked for; with 0 there are no alternatives, only the tokens' own."""
    names = [_name(token.piece) for token in tokens]
    own = [None if token.logprob is None else _finite(token.logprob.logprob) for token in tokens]
    tops: list[dict[str, float] | None] | None = None
    if alternatives:
        tops = []
        for token in tokens:
            if token.logprob is None:
                tops.append(None)
                continue
            top: dict[str, float] = {}
            # Two tokens may have one text (a special token and the same characters); the likelier is kept.
            for token_id, logprob in (*token.logprob.top, (token.logprob.token_id, token.logprob.logprob)):
                top.setdefault(_name(pieces.label(token_id)), _finite(logprob))
            tops.append(top)
    return LegacyLogprobs(names, own, tops, [token.offset for token in tokens])


def _finite(logprob: float) -> float:
    # In this order NaN, too, becomes the least.
    return max(_LEAST, logprob)


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


def _name(piece: bytes) -> str:
    """The old shape has no bytes beside the text, so that parts of a character must differ in their names."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
