"""One chat request: sent, its stream read, its outcome told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tidelane.engine.bench.http_stream import Answer, BrokenAnswer, Target, exchange
from tidelane.engine.bench.outcome import Failure, Outcome
from tidelane.engine.bench.prompts import Ruler
from tidelane.engine.bench.traffic import Arrival

_DONE = b"[DONE]"
# Words of the two prompts by which a server's counting is measured.
_RULED = (8, 40)


class CannotAsk(ValueError):
    """Nothing answers there, or it refuses what is asked; the message is the reason."""


@dataclass(frozen=True, slots=True)
class ChatClient:
    """Asks `model` at `target`. `clock` tells seconds since the run started.

    `ignore_eos` asks for answers of the length wanted, which vLLM, SGLang and Tidelane understand.
    """

    target: Target
    model: str
    clock: Callable[[], float]
    ignore_eos: bool = True
    timeout_s: float = 600.0
    headers: Mapping[str, str] = field(default_factory=dict)
    ruler: Ruler = field(default_factory=Ruler)

    async def ask(self, arrival: Arrival, prompt_seed: str) -> Outcome:
        """Whatever goes wrong is in the outcome."""
        body = self._body(arrival, prompt_seed)
        stream = _Stream(self.clock)
        sent_s = self.clock()
        failure: Failure | None = None
        detail = ""
        try:
            async with asyncio.timeout(self.timeout_s):
                async with exchange(self.target, "POST", "/v1/chat/completions", body, self.headers) as answer:
                    failure, detail = await self._read(answer, stream)
        except TimeoutError:
            failure, detail = Failure.TIMEOUT, f"no end after {self.timeout_s:g} s"
        except OSError as error:
            broke_off = stream.begun or isinstance(error, BrokenAnswer)
            failure, detail = Failure.BROKEN_STREAM if broke_off else Failure.NO_CONNECTION, str(error)
        return Outcome(
            arrival,
            sent_s,
            self.clock(),
            tuple(stream.token_times_s),
            stream.input_tokens,
            stream.output_tokens,
            failure,
            detail,
        )

    async def measured(self) -> ChatClient:
        """The same client, once it knows by two requests how the server counts; as it is if the server tells nothing.

        They take one token each, before the traffic starts. Raises CannotAsk where the traffic would fare no better.
        """
        counted: list[tuple[int, int]] = []
        for words in _RULED:
            outcome = await self.ask(Arrival(0.0, self.ruler.words(words), 1), f"ruler:{words}")
            if outcome.failure in (Failure.NO_CONNECTION, Failure.BAD_REQUEST):
                raise CannotAsk(outcome.detail)
            if outcome.failure is not None or outcome.input_tokens is None:
                return self
            counted.append((words, outcome.input_tokens))
        return replace(self, ruler=Ruler.between(*counted))

    def _body(self, arrival: Arrival, prompt_seed: str) -> bytes:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": self.ruler.prompt(arrival, prompt_seed)}],
            "max_tokens": arrival.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if arrival.tier:
            body["service_tier"] = arrival.tier
        if self.ignore_eos:
            body["ignore_eos"] = True
        return json.dumps(body).encode()

    async def _read(self, answer: Answer, stream: _Stream) -> tuple[Failure | None, str]:
        if answer.status != 200:
            return _refusal(answer.status), f"{answer.status}: {_message(await answer.body())}"
        stream.begun = True
        try:
            async for data in sse_data(answer):
                if data == _DONE:
                    return None, ""
                event = json.loads(data)
                if "error" in event:
                    return Failure.STREAM_ERROR, str(event["error"])[:200]
                stream.take(event)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return Failure.BROKEN_STREAM, f"not an event of a chat: {error!r}"
        return Failure.BROKEN_STREAM, "the stream ended without [DONE]"


class _Stream:
    """Counts tokens and notes when they came."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.begun = False
        self.token_times_s: list[float] = []
        self.input_tokens: int | None = None
        self.output_tokens = 0

    def take(self, event: Mapping[str, Any]) -> None:
        usage = event.get("usage")
        if usage is not None:
            self.input_tokens = usage["prompt_tokens"]
        if event["choices"]:
            has_text = any(choice["delta"].get("content") for choice in event["choices"])
            tokens = self.output_tokens + has_text if usage is None else usage["completion_tokens"]
            if tokens > self.output_tokens:
                self.output_tokens = tokens
                self.token_times_s.append(self._clock())
        elif usage is not None:  # the closing count: tokens that brought no text are in it
            self.output_tokens = usage["completion_tokens"]


async def sse_data(answer: Answer) -> AsyncIterator[bytes]:
    """The data of each server-sent event."""
    rest = b""
    async for piece in answer.pieces():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _refusal(status: int) -> Failure:
    if status in (429, 503):
        return Failure.REFUSED
    return Failure.BAD_REQUEST if 400 <= status < 500 else Failure.SERVER_ERROR


def _message(body: bytes) -> str:
    """The server's own words, if it sent an OpenAI error."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
