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


class NoChatTemplate(Exception):
    """The model's folder has no chat template: it is not a chat model."""


class Tokenizer:
    """Encodes prompts. Every method may be called from any thread."""

    def __init__(self, encoder: tokenizers.Tokenizer, pieces: Pieces, template: ChatTemplate | None) -> None:
        # A folder may carry the truncation and padding of its training; a prompt must never be cut silently.
        encoder.no_truncation()
        encoder.no_padding()
        self._encoder = encoder
        self._template = template
        self.pieces = pieces

    @classmethod
    def load(cls, folder: Path, now: Callable[[], datetime]) -> Tokenizer:
        raw = (folder / "tokenizer.json").read_text()
        encoder = tokenizers.Tokenizer.from_str(raw)
        config = _read_object(folder / "tokenizer_config.json")
        source = _template_source(folder, config)
        template = None if source is None else ChatTemplate(source, _token_names(config), now)
        return cls(encoder, Pieces(encoder, json.loads(raw).get("decoder")), template)

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of a plain prompt, with the special tokens that the model puts at the start of a text."""
        return tuple(self._encoder.encode(text).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> tuple[int, ...]:
        """Tokens of a chat. Raises TemplateRefused, or NoChatTemplate."""
        if self._template is None:
            raise NoChatTemplate
        # The template has written the special tokens itself.
        return tuple(self._encoder.encode(self._template.render(messages, options), add_special_tokens=False).ids)


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
