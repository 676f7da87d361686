"""`/v1/chat/completions`: its own fields, and its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET
from msgspec.json import encode
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from tidelane.engine.http.chat_template import TemplateRefused
from tidelane.engine.http.choice import Choice, Delta
from tidelane.engine.http.errors import BadRequest
from tidelane.engine.http.fields import Body
from tidelane.engine.http.header import AnswerHeader
from tidelane.engine.http.logprobs import chat_logprobs
from tidelane.engine.http.pieces import Pieces
from tidelane.engine.http.sequences import Asked, output_budget, prompt_too_long, requests_for
from tidelane.engine.http.service import Model, Service
from tidelane.engine.http.shapes import ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatDelta, ChatMessage
from tidelane.engine.http.streams import event
from tidelane.engine.http.tokenizer import NoChatTemplate, TooLong

# Far beyond any chat that a context holds: each costs time before anything is known of its tokens.
_MAX_MESSAGES = 4096
_MAX_PARTS = 1024
# What a message costs the template, as characters of text that take as long.
_CHARS_PER_MESSAGE = 64


def _content(value: Any) -> str:
    """Text of a message; parts are joined by line breaks, since templates take one string."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or len(value) > _MAX_PARTS:
        raise PydanticCustomError("content", f"must be a string or a list of at most {_MAX_PARTS} parts")
    texts = []
    for part in value:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise PydanticCustomError(
                "content", "must hold parts of the form `type: text, text: …` only: this model reads text"
            )
        texts.append(text)
    return "\n".join(texts)


def _no_tool_calls(value: Any) -> None:
    if value not in (None, []):
        raise PydanticCustomError("tools", "is not supported by this server; leave it out")


class Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(lambda value: "" if value is None else _content(value))]
    name: str | None = None
    tool_calls: Annotated[None, BeforeValidator(_no_tool_calls)] = None

    def for_template(self) -> dict[str, str]:
        # "developer" is the newer name of "system", which templates do not know.
        message = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        return message if self.name is None else {**message, "name": self.name}


class ChatBody(Body):
    messages: Annotated[list[Message], Field(min_length=1, max_length=_MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


async def chat_choices(service: Service, model: Model, body: ChatBody, asked: Asked) -> list[Choice]:
    """The choices to generate. Raises BadRequest."""
    messages = [message.for_template() for message in body.messages]
    chars = sum(len(message.content) + _CHARS_PER_MESSAGE for message in body.messages)
    limit = model.facts.max_context_tokens
    try:
        prompt = await service.off_loop(
            lambda: model.tokenizer.encode_chat(messages, body.chat_template_kwargs, limit), chars
        )
    except TooLong as error:
        raise prompt_too_long(error.chars, model.facts, "messages") from None
    except TemplateRefused as error:
        raise BadRequest(
            f"The model's chat template refused the messages: {error}", param="messages", code="chat_template_error"
        ) from error
    except NoChatTemplate:
        raise BadRequest(
            "This model has no chat template; use /v1/completions.", param="model", code="no_chat_template"
        ) from None
    if not prompt:
        raise BadRequest("The prompt holds no token.", param="messages", code="empty_prompt")
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    budget = output_budget(len(prompt), wanted, None, model.facts, "messages")
    requests = requests_for([prompt], [budget], body, asked, model.facts)
    return [Choice(number, request, model.tokenizer.pieces, body.stop) for number, request in enumerate(requests)]


def logprobs_asked(body: ChatBody) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest("`top_logprobs` needs `logprobs: true`.", param="top_logprobs", code="invalid_value")
    return (body.top_logprobs or 0) if body.logprobs else None


class ChatWriter:
    def __init__(self, header: AnswerHeader, choices: Sequence[Choice], pieces: Pieces, *, logprobs: bool) -> None:
        self._header = header
        self._choices = choices
        self._pieces = pieces
        self._logprobs = logprobs
        self._begun: set[int] = set()

    def events(self, delta: Delta) -> bytes:
        logprobs = chat_logprobs(delta.tokens, self._pieces) if self._logprobs else None
        events = []
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            events.append(self._chunk(ChatChunkChoice(delta.index, ChatDelta(role="assistant", content=""))))
        if delta.text:
            events.append(self._chunk(ChatChunkChoice(delta.index, ChatDelta(content=delta.text), logprobs)))
            logprobs = None
        if delta.finish is not None:
            events.append(self._chunk(ChatChunkChoice(delta.index, ChatDelta(), logprobs, delta.finish.value)))
        return b"".join(events)

    def closing_events(self) -> bytes:
        if not self._header.include_usage:
            return b""
        return self._event([], usage_now=True)

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        choices = []
        for delta in deltas:
            assert delta.finish is not None
            logprobs = chat_logprobs(delta.tokens, self._pieces) if self._logprobs else None
            choices.append(ChatChoice(delta.index, ChatMessage(delta.text), logprobs, delta.finish.value))
        header = self._header
        return encode(
            ChatCompletion(header.id, header.created, header.model, header.tier, choices, header.usage(self._choices))
        )

    def _chunk(self, choice: ChatChunkChoice) -> bytes:
        return self._event([choice], usage_now=self._header.continuous_usage)

    def _event(self, choices: list[ChatChunkChoice], *, usage_now: bool) -> bytes:
        header = self._header
        usage = header.usage(self._choices) if usage_now else None if header.include_usage else UNSET
        return event(ChatChunk(header.id, header.created, header.model, header.tier, choices, usage))
