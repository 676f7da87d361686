"""Whatever a client sends: 4xx with OpenAI's error body, never 500, and a server that goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.http.fake_loop import FakeLoop
from engine.http.front_process import FrontProcess

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": MESSAGES},
    TEXT: {"model": "tiny", "prompt": "hi"},
}


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    return error


BOTH: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 1.1}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"n": 10**30}, "n"),
    ({"n": "2"}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": False}, "max_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "a" * 1025}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": True}}, "logit_bias"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": {"²": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"cache_salt": "a" * 257}, "cache_salt"),
    ({"model": 5}, "model"),
    ({"best_of": 2}, "best_of"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"suffix": "end"}, "suffix"),
    ({"min_tokens": 5}, "min_tokens"),
    ({"guided_json": {}}, "guided_json"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
]
BAD_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    *[(path, fields, param) for path in (CHAT, TEXT) for fields, param in BOTH],
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": ["hi"]}, "messages.0"),
    (CHAT, {"messages": [{"role": "user", "content": ""}] * 4097}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 1025}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages.0.role"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "user", "content": ["hi"]}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages.0.tool_calls"),
    (CHAT, {"messages": [{"role": "assistant", "content": "I begin"}]}, "messages"),
    (CHAT, {"logprobs": 5}, "logprobs"),
    (CHAT, {"top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"chat_template": "{{ 1 }}"}, "chat_template"),
    (CHAT, {"chat_template_kwargs": "x"}, "chat_template_kwargs"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": ["a", ""]}, "prompt"),
    (TEXT, {"prompt": [[]]}, "prompt"),
    (TEXT, {"prompt": [[5], []]}, "prompt"),
    (TEXT, {"prompt": 5}, "prompt"),
    (TEXT, {"prompt": {"text": "a"}}, "prompt"),
    (TEXT, {"prompt": [5, "a"]}, "prompt"),
    (TEXT, {"prompt": [True]}, "prompt"),
    (TEXT, {"prompt": [5.0]}, "prompt"),
    (TEXT, {"prompt": [-1]}, "prompt"),
    (TEXT, {"prompt": [10**6]}, "prompt"),
    (TEXT, {"prompt": [10**40]}, "prompt"),
    (TEXT, {"logprobs": 21}, "logprobs"),
    (TEXT, {"logprobs": True}, "logprobs"),
    (TEXT, {"echo": "yes"}, "echo"),
    (TEXT, {"prompt": ["a"] * 100, "n": 6}, "n"),
]


@pytest.mark.parametrize(("path", "fields", "param"), BAD_FIELDS)
def test_a_bad_field_is_400_and_named(
    http: httpx.Client, loop: FakeLoop, path: str, fields: dict[str, Any], param: str
) -> None:
    response = http.post(path, json=GOOD[path] | fields)
    error = error_of(response)
    assert response.status_code == 400
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert loop.submitted == []


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("missing", ["model", "prompt or messages"])
def test_a_missing_field_is_named(http: httpx.Client, path: str, missing: str) -> None:
    name = missing if missing == "model" else ("messages" if path == CHAT else "prompt")
    body = {key: value for key, value in GOOD[path].items() if key != name}
    for value in (body, body | {name: None}):
        response = http.post(path, json=value)
        assert response.status_code == 400
        assert (error_of(response)["param"], error_of(response)["code"]) == (name, "missing_required_parameter")


def test_token_ids_outside_the_vocabulary_are_400(http: httpx.Client) -> None:
    for param, value in (("logit_bias", {"99999999": 1}), ("stop_token_ids", [10**20])):
        response = http.post(TEXT, json=GOOD[TEXT] | {param: value})
        assert (response.status_code, error_of(response)["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (TEXT, {"temperature": 3}, "`temperature` must be at most 2; got 3."),
        (TEXT, {"seed": -(2**63) - 1}, f"`seed` must be at least {-(2**63)}; got {-(2**63) - 1}."),
        (TEXT, {"n": 1.5}, "`n` must be a whole number; got 1.5."),
        (TEXT, {"stream": 1}, "`stream` must be true or false; got 1."),
        (TEXT, {"model": 5}, "`model` must be a string; got 5."),
        (TEXT, {"stop_token_ids": [1] * 65}, "`stop_token_ids` must hold at most 64; got a list of 65."),
        (CHAT, {"messages": []}, "`messages` must hold at least 1; got a list of 0."),
        (CHAT, {"messages": ["hi"]}, "`messages.0` must be an object; got 'hi'."),
        (CHAT, {"messages": "hi"}, "`messages` must be a list; got 'hi'."),
    ],
)
def test_what_is_refused_says_what_would_be_right(
    http: httpx.Client, path: str, fields: dict[str, Any], message: str
) -> None:
    assert error_of(http.post(path, json=GOOD[path] | fields))["message"] == message


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"5",
        b"\xff\xfe",
        b'{"model": "tiny", "model": }',
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": 1e999}',
        b'{"user": "\\ud800"}',
        b'{"max_tokens": ' + b"9" * 10_000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
    ids=lambda body: repr(body[:24]),
)
def test_bad_json_is_400(http: httpx.Client, path: str, body: bytes) -> None:
    response = http.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


def test_deep_values_in_ignored_fields_are_harmless(http: httpx.Client) -> None:
    deep = b"[" * 200 + b"]" * 200
    body = b'{"model": "tiny", "prompt": "a", "max_tokens": 1, "metadata": ' + deep + b"}"
    assert http.post(TEXT, content=body, headers={"content-type": "application/json"}).status_code == 200


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_a_body_that_does_not_claim_to_be_json_is_refused(http: httpx.Client, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    response = http.post(TEXT, content=json.dumps(GOOD[TEXT]).encode(), headers=headers)
    assert response.status_code == 415
    assert "Content-Type" in error_of(response)["message"]


def test_json_with_a_charset_is_taken(http: httpx.Client) -> None:
    body = json.dumps(GOOD[TEXT]).encode()
    response = http.post(TEXT, content=body, headers={"content-type": "Application/JSON; charset=utf-8"})
    assert response.status_code == 200


def test_a_body_over_the_bound_is_413(http: httpx.Client) -> None:
    size = 16 * 2**20 + 1

    def parts() -> Iterator[bytes]:
        yield from [b" " * 2**20] * 17

    for content in (b" " * size, parts()):
        response = http.post(TEXT, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 413
        assert error_of(response)["code"] == "body_too_large"


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_unknown_model_is_404(http: httpx.Client, path: str) -> None:
    response = http.post(path, json=GOOD[path] | {"model": "gpt-9"})
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"
    assert "'tiny'" in error_of(response)["message"]


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/v1/nothing", 404), ("GET", "/", 404), ("GET", CHAT, 405), ("DELETE", "/v1/models", 405),
    ("GET", "/v1/models/other", 404),
])  # fmt: skip
def test_unknown_routes_and_methods_have_the_same_shape(
    http: httpx.Client, method: str, path: str, status: int
) -> None:
    response = http.request(method, path)
    assert response.status_code == status
    error_of(response)


def test_a_chat_template_that_raises_is_400_with_its_message(http: httpx.Client) -> None:
    response = http.post(CHAT, json=GOOD[CHAT] | {"messages": [{"role": "assistant", "content": "I begin"}]})
    assert response.status_code == 400
    assert "The assistant cannot speak first" in error_of(response)["message"]
    assert error_of(response)["code"] == "chat_template_error"


@pytest.mark.parametrize("fields", [
    {"tools": []}, {"tool_choice": "none"}, {"response_format": {"type": "text"}}, {"best_of": 1}, {"top_k": -1},
    {"user": "me", "metadata": {}, "store": True, "unheard_of": [1]}, {"temperature": None, "stop": None, "n": None},
    {"temperature": 0}, {"top_p": 1}, {"seed": -1}, {"logit_bias": {}}, {"stop": []}, {"max_tokens": None},
])  # fmt: skip
def test_what_asks_for_nothing_unusual_is_served(http: httpx.Client, fields: dict[str, Any]) -> None:
    for path in (CHAT, TEXT):
        response = http.post(path, json=GOOD[path] | fields)
        assert response.status_code == 200, response.text


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_FIELDS = [
    "messages", "prompt", "n", "max_tokens", "temperature", "top_p", "top_k", "stop", "stream", "stream_options",
    "logprobs", "top_logprobs", "logit_bias", "echo", "seed", "service_tier", "tools", "best_of", "stop_token_ids",
    "chat_template_kwargs", "ignore_eos",
]  # fmt: skip


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from([CHAT, TEXT]), fields=st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=4))
def test_no_body_makes_it_fail(shared_front: FrontProcess, path: str, fields: dict[str, Any]) -> None:
    http = shared_front.http
    response = http.post(path, json=GOOD[path] | {"max_tokens": 2} | fields)
    assert response.status_code in (200, 400), (fields, response.text)
    if response.status_code == 400:
        error_of(response)
    assert http.get("/ready").status_code == 200


def test_a_salt_that_is_no_text_is_refused(http: httpx.Client) -> None:
    """JSON can spell half of a character, which cannot be passed on."""
    body = json.dumps({"model": "tiny", "prompt": "hi", "cache_salt": "\ud800"})
    response = http.post(TEXT, content=body.encode(), headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"]
