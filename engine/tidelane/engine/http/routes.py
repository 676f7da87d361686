"""The routes. Each parses, submits a call, and hands it to a writer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tidelane.engine.http.body import read_json
from tidelane.engine.http.call import Call
from tidelane.engine.http.chat import ChatBody, ChatWriter, chat_choices, logprobs_asked
from tidelane.engine.http.choice import Choice
from tidelane.engine.http.client_watch import ClientWatch
from tidelane.engine.http.completions import (
    CompletionBody,
    CompletionWriter,
    completion_choices,
    prompt_logprobs_asked,
)
from tidelane.engine.http.edge import arrival_s
from tidelane.engine.http.errors import BadRequest, NoSuchThing
from tidelane.engine.http.fields import Body, parse
from tidelane.engine.http.header import AnswerHeader
from tidelane.engine.http.load import load_of
from tidelane.engine.http.sequences import Asked, Targets
from tidelane.engine.http.service import Service
from tidelane.engine.http.streams import EventStream, Writer
from tidelane.engine.http.watching import watching_routes

# What a person looks through; all that are kept come with a larger limit.
DEFAULT_DECISIONS = 100


def routes(service: Service) -> list[Route]:
    started = int(service.unix_s())

    async def chat_completions(request: Request) -> Response:
        fields = await _fields(service, request)
        body = parse(ChatBody, fields)
        _check_model(service, body.model)
        asked = _asked(service, request, body, "chatcmpl", logprobs=logprobs_asked(body))
        model = service.serving_model()
        with ExitStack() as resources:
            client = _watch(request, resources)
            choices = await chat_choices(service, model, body, asked)
            header = AnswerHeader.of(asked.call_id, int(service.unix_s()), body)
            writer = ChatWriter(header, choices, model.tokenizer.pieces, logprobs=body.logprobs)
            return await _answer(service, choices, writer, client, body.stream, resources)

    async def completions(request: Request) -> Response:
        fields = await _fields(service, request)
        body = parse(CompletionBody, fields)
        _check_model(service, body.model)
        asked = _asked(
            service, request, body, "cmpl", logprobs=body.logprobs, prompt_logprobs=prompt_logprobs_asked(body)
        )
        model = service.serving_model()
        with ExitStack() as resources:
            client = _watch(request, resources)
            choices = await completion_choices(service, model, body, asked)
            header = AnswerHeader.of(asked.call_id, int(service.unix_s()), body)
            writer = CompletionWriter(header, choices, model.tokenizer.pieces, logprobs=body.logprobs)
            return await _answer(service, choices, writer, client, body.stream, resources)

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model_card(service, started)]})

    async def one_model(request: Request) -> Response:
        _check_model(service, request.path_params["name"])
        return JSONResponse(_model_card(service, started))

    async def load(_: Request) -> Response:
        return Response(msgspec.json.encode(load_of(service, started)), media_type="application/json")

    async def decisions(request: Request) -> Response:
        found = await service.decisions(_limit(request))
        # `now_s` is of the clock that gives `time_s`, so that a reader can tell how old a decision is.
        answer = {"now_s": service.monotonic_s(), "decisions": found}
        return Response(msgspec.json.encode(answer), media_type="application/json")

    return [
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", one_model),
        Route("/load", load),
        *watching_routes(service.unready, service.metrics.exposition),
        Route("/debug/decisions", decisions),
    ]


async def _fields(service: Service, request: Request) -> dict[str, Any]:
    # Before the body: a server that cannot serve need not read 16 MiB first.
    service.serving_model()
    return await read_json(request, service.limits.body_bytes, service.limits.body_timeout_s)


def _limit(request: Request) -> int:
    text = request.query_params.get("limit", str(DEFAULT_DECISIONS))
    # Digits of ASCII only, and few: int() also takes "+1", " 1" and what takes long to read.
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) > 0):
        raise BadRequest("limit must be a whole number, 1 or more.", param="limit", code="invalid_value")
    return int(text)


def _check_model(service: Service, name: str) -> None:
    if name != service.served_name:
        raise NoSuchThing(
            f"The model {name[:200]!r} does not exist; this server serves {service.served_name!r}.",
            param="model", code="model_not_found",
        )  # fmt: skip


def _asked(
    service: Service,
    request: Request,
    body: Body,
    prefix: str,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> Asked:
    return Asked(
        call_id=f"{prefix}-{service.random_bits(128):032x}",
        arrival_s=arrival_s(request.scope),
        targets=Targets.from_headers(request.headers),
        seed=service.random_bits(63) if body.seed is None else body.seed,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _watch(request: Request, resources: ExitStack) -> ClientWatch:
    client = ClientWatch(request.receive)
    resources.callback(client.stop)
    return client


async def _answer(
    service: Service,
    choices: Sequence[Choice],
    writer: Writer,
    client: ClientWatch,
    stream: bool,
    resources: ExitStack,
) -> Response:
    if client.gone:
        return _nobody()
    # Once more: tokenising took its time.
    service.serving_model()
    call = Call(service.link, service.metrics, choices, service.limits.unread_tokens if stream else None)
    service.open_calls += 1
    resources.callback(_close, service, call)
    client.when_gone(call.close)
    call.open()
    if not await call.admitted():
        return _nobody()
    if stream:
        return EventStream(call, writer, resources.pop_all())
    if not await call.ended():
        return _nobody()
    return Response(writer.whole(call.take()), media_type="application/json")


def _close(service: Service, call: Call) -> None:
    service.open_calls -= 1
    call.close()


def _nobody() -> Response:
    # Goes nowhere; the status is nginx's for a client that closed the connection, and shows in the metrics.
    return Response(status_code=499)


def _model_card(service: Service, created: int) -> dict[str, Any]:
    card = {"id": service.served_name, "object": "model", "created": created, "owned_by": "tidelane"}
    if service.model is not None:
        card["max_model_len"] = service.model.facts.max_context_tokens
    return card
