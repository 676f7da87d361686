"""Text to tokens, from the model's folder: tokenizer.json, tokenizer_config.json and the chat template.

The `tokenizers` library alone reads these in a third of a second and 65 MiB; transformers' AutoTokenizer takes ten
times the memory, since it imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers

from tidelane.engine.http.chat_template import ChatTemplate
from tidelane.engine.http.pieces import Pieces

# Unicode's normal forms make one character of up to four.
_CHARS_BEFORE_NORMALIZING = 4


class NoChatTemplate(Exception):
    """The model's folder has no chat template: it is not a chat model."""


class TooLong(Exception):
    """The text cannot come to as few tokens as were allowed; found out by its length alone."""

    def __init__(self, chars: int) -> None:
        super().__init__(f"{chars} characters")
        self.chars = chars


class Tokenizer:
    """Encodes prompts. Every method may be called from any thread, and keeps no other waiting.

    `max_tokens` spares the seconds that encoding a text takes that will not fit: such a text raises TooLong at once.
    One that is encoded may still come to more.
    """

    def __init__(self, encoder: tokenizers.Tokenizer, pieces: Pieces, template: ChatTemplate | None) -> None:
        # A folder may carry the truncation and padding of its training; a prompt must never be cut silently.
        encoder.no_truncation()
        encoder.no_padding()
        self._encoder = encoder
        self._template = template
        self.pieces = pieces
        # A byte-level token is written with a character for each byte, so that this bounds its characters all the more.
        self._most_chars_per_token = max(map(len, encoder.get_vocab()), default=1)
        if encoder.normalizer is not None:
            self._most_chars_per_token *= _CHARS_BEFORE_NORMALIZING

    @classmethod
    def load(cls, folder: Path, now: Callable[[], datetime]) -> Tokenizer:
        raw = (folder / "tokenizer.json").read_text()
        encoder = tokenizers.Tokenizer.from_str(raw)
        config = _read_object(folder / "tokenizer_config.json")
        source = _template_source(folder, config)
        template = None if source is None else ChatTemplate(source, _token_names(config), now)
        return cls(encoder, Pieces(encoder, json.loads(raw).get("decoder")), template)

    def encode(self, text: str, max_tokens: int) -> tuple[int, ...]:
        """Tokens of a plain prompt, with the special tokens that the model puts at the start of a text."""
        return self._encode(text, max_tokens, special=True)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], max_tokens: int
    ) -> tuple[int, ...]:
        """Tokens of a chat. Raises TemplateRefused, or NoChatTemplate."""
        if self._template is None:
            raise NoChatTemplate
        # The template has written the special tokens itself.
        return self._encode(self._template.render(messages, options), max_tokens, special=False)

    def _encode(self, text: str, max_tokens: int, *, special: bool) -> tuple[int, ...]:
        if len(text) > max_tokens * self._most_chars_per_token:
            raise TooLong(len(text))
        # A batch of one, since `encode` holds the GIL: for seconds, where a text is long.
        return tuple(self._encoder.encode_batch([text], add_special_tokens=special)[0].ids)


def _read_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    value = json.loads(path.read_text())
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} does not hold a JSON object")
    return value


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text()
    template = _read_object(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _token_names(config: Mapping[str, Any]) -> dict[str, str]:
    names = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            names[key] = text
    return names
