"""`/v1/completions`: prompts in their four forms, echo, the old log-probabilities; and its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import UNSET
from msgspec.json import encode
from pydantic import Field

from tidelane.engine.channel import Facts
from tidelane.engine.http.choice import Choice, Delta, Echo
from tidelane.engine.http.errors import BadRequest
from tidelane.engine.http.fields import Body
from tidelane.engine.http.header import AnswerHeader
from tidelane.engine.http.logprobs import legacy_logprobs
from tidelane.engine.http.pieces import Pieces
from tidelane.engine.http.sequences import MAX_SEQUENCES, Asked, output_budget, prompt_too_long, requests_for
from tidelane.engine.http.service import Model, Service
from tidelane.engine.http.shapes import LegacyLogprobs, TextChoice, TextCompletion
from tidelane.engine.http.streams import event
from tidelane.engine.http.tokenizer import TooLong

_DEFAULT_OUTPUT_TOKENS = 16  # OpenAI's


class CompletionBody(Body):
    # Its four forms are told apart by hand: a union would answer with every form's complaint.
    prompt: Any
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; `text` is None if the client sent tokens."""

    text: str | None
    tokens: tuple[int, ...]


async def completion_choices(service: Service, model: Model, body: CompletionBody, asked: Asked) -> list[Choice]:
    """The choices to generate. Raises BadRequest."""
    prompts = await service.off_loop(lambda: _prompts(model, body.prompt), _size(body.prompt, model.facts))
    if any(not prompt.tokens for prompt in prompts):
        raise BadRequest("`prompt` must hold at least one token.", param="prompt", code="empty_prompt")
    if body.max_tokens == 0 and not body.echo:
        raise BadRequest(
            "`max_tokens` must be at least 1 unless `echo` is true.", param="max_tokens", code="invalid_value"
        )
    budgets = [
        output_budget(len(prompt.tokens), body.max_tokens, _DEFAULT_OUTPUT_TOKENS, model.facts, "prompt")
        for prompt in prompts
    ]
    requests = requests_for([prompt.tokens for prompt in prompts], budgets, body, asked, model.facts)
    return [
        Choice(
            number, request, model.tokenizer.pieces, body.stop,
            Echo(prompts[number // body.n].text) if body.echo else None,
        )
        for number, request in enumerate(requests)
    ]  # fmt: skip


def prompt_logprobs_asked(body: CompletionBody) -> int | None:
    if not body.echo:
        return None
    # With no token to generate there must be something for the loop to do.
    return 0 if body.logprobs is None and body.max_tokens == 0 else body.logprobs


def _size(value: Any, facts: Facts) -> int:
    """How many characters and token ids there are to go through; a list too long for any reading is refused here."""
    if not isinstance(value, list):
        return len(value) if isinstance(value, str) else 0
    if len(value) > max(MAX_SEQUENCES, facts.max_context_tokens):
        raise _too_many(len(value), facts)
    return len(value) + sum(len(item) for item in value if isinstance(item, str | list))


def _prompts(model: Model, value: Any) -> list[Prompt]:
    if isinstance(value, str) or _is_ids(value):
        value = [value]
    if not isinstance(value, list) or not value:
        raise _bad_prompt()
    if all(isinstance(text, str) for text in value):
        return [Prompt(text, _encoded(text, model)) for text in value]
    if all(_is_ids(ids) or ids == [] for ids in value):
        return [Prompt(None, _checked(ids, model.facts)) for ids in value]
    raise _bad_prompt()


def _encoded(text: str, model: Model) -> tuple[int, ...]:
    try:
        return model.tokenizer.encode(text, model.facts.max_context_tokens)
    except TooLong as error:
        raise prompt_too_long(error.chars, model.facts, "prompt") from None


def _is_ids(value: Any) -> bool:
    # bool is an int to Python, but not to JSON.
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _checked(ids: list[int], facts: Facts) -> tuple[int, ...]:
    for token_id in ids:
        if not 0 <= token_id < facts.vocab_size:
            shown = token_id if abs(token_id) < 10**18 else "a huge number"
            raise BadRequest(
                f"`prompt` holds token id {shown}, outside the vocabulary of {facts.vocab_size} tokens.",
                param="prompt", code="invalid_value",
            )  # fmt: skip
    return tuple(ids)


def _too_many(items: int, facts: Facts) -> BadRequest:
    return BadRequest(
        f"`prompt` holds {items} items; it may hold {facts.max_context_tokens} token ids, the model's context, or "
        f"{MAX_SEQUENCES} prompts.", param="prompt", code="context_length_exceeded",
    )  # fmt: skip


def _bad_prompt() -> BadRequest:
    return BadRequest(
        "`prompt` must be a text, a list of texts, a list of token ids, or a list of lists of token ids.",
        param="prompt", code="invalid_value",
    )  # fmt: skip


class CompletionWriter:
    def __init__(
        self, header: AnswerHeader, choices: Sequence[Choice], pieces: Pieces, *, logprobs: int | None
    ) -> None:
        self._header = header
        self._choices = choices
        self._pieces = pieces
        self._alternatives = logprobs

    def events(self, delta: Delta) -> bytes:
        logprobs = self._logprobs(delta)
        events = []
        if delta.text:
            events.append(self._chunk(TextChoice(delta.index, delta.text, logprobs)))
            logprobs = None
        if delta.finish is not None:
            events.append(self._chunk(TextChoice(delta.index, "", logprobs, delta.finish.value)))
        return b"".join(events)

    def closing_events(self) -> bytes:
        return self._event([], usage_now=True) if self._header.include_usage else b""

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        choices = []
        for delta in deltas:
            assert delta.finish is not None
            choices.append(TextChoice(delta.index, delta.text, self._logprobs(delta), delta.finish.value))
        header = self._header
        return encode(
            TextCompletion(header.id, header.created, header.model, header.tier, choices, header.usage(self._choices))
        )

    def _logprobs(self, delta: Delta) -> LegacyLogprobs | None:
        return None if self._alternatives is None else legacy_logprobs(delta.tokens, self._pieces, self._alternatives)

    def _chunk(self, choice: TextChoice) -> bytes:
        return self._event([choice], usage_now=self._header.continuous_usage)

    def _event(self, choices: list[TextChoice], *, usage_now: bool) -> bytes:
        header = self._header
        usage = header.usage(self._choices) if usage_now else None if header.include_usage else UNSET
        return event(TextCompletion(header.id, header.created, header.model, header.tier, choices, usage))
