from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from engine.http.fake_loop import FakeLoop, Script
from engine.http.front_process import FrontProcess
from engine.http.sse import DONE, chat_text, events, text
from engine.http.tiny_model import id_of
from tidelane.engine.request import FinishReason

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
COMPLETION = {"model": "tiny", "prompt": "hi", "stream": True}


def chat_events(http: httpx.Client, **fields: Any) -> list[Any]:
    with http.stream("POST", "/v1/chat/completions", json=CHAT | fields) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(events(response))


def byte_tokens(tokenizer: Tokenizer, word: str) -> list[int]:
    return [token for character in word for token in tokenizer.encode(character).ids]


def test_chat_stream_has_role_text_one_terminal_chunk_and_done(
    http: httpx.Client, loop: FakeLoop, tokenizer: Tokenizer
) -> None:
    loop.answer(Script(tokens=tokenizer.encode("The capital is Paris 🙂.").ids))
    chunks = chat_events(http)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chat_text(chunks) == "The capital is Paris 🙂."
    assert chunks[-1] == DONE
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert finishes == [None] * (len(finishes) - 1) + ["length"]
    assert all("usage" not in chunk for chunk in chunks[:-1])
    assert {(chunk["id"], chunk["object"], chunk["model"]) for chunk in chunks[:-1]} == {
        (chunks[0]["id"], "chat.completion.chunk", "tiny")
    }


def test_each_token_is_sent_as_it_comes(http: httpx.Client, loop: FakeLoop, tokenizer: Tokenizer) -> None:
    loop.hold()
    loop.answer(Script(tokens=byte_tokens(tokenizer, "abc")))
    with http.stream("POST", "/v1/completions", json=COMPLETION) as response:
        stream = events(response)
        for letter in "abc":
            loop.step()
            assert next(stream)["choices"][0]["text"] == letter


def test_nothing_is_sent_while_text_may_become_a_stop_string(
    http: httpx.Client, loop: FakeLoop, tokenizer: Tokenizer
) -> None:
    loop.answer(Script(tokens=byte_tokens(tokenizer, "abENJ")))
    chunks = chat_events(http, stop="END")
    contents = [chunk["choices"][0]["delta"].get("content") for chunk in chunks[1:-2]]
    assert "" not in contents
    assert "".join(contents) == "abENJ"
    assert not any(content in ("E", "N", "EN") for content in contents)


def test_a_stop_string_ends_the_stream_once_and_aborts_the_rest(
    http: httpx.Client, loop: FakeLoop, tokenizer: Tokenizer
) -> None:
    loop.hold()
    loop.answer(Script(tokens=byte_tokens(tokenizer, "abSTOPcdefgh")))
    with http.stream("POST", "/v1/completions", json=COMPLETION | {"stop": ["STOP"]}) as response:
        loop.step(6)
        chunks = list(events(response))
    assert text(chunks) == "ab"
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]].count("stop") == 1
    assert chunks[-1] == DONE
    (abort,) = loop.wait_for_aborts(1)
    assert abort.reason is FinishReason.STOP
    assert abort.request_id == loop.submitted[0].id


def test_a_split_character_is_sent_whole(http: httpx.Client, loop: FakeLoop, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("日🙂").ids
    assert len(ids) > 2
    loop.answer(Script(tokens=ids))
    chunks = chat_events(http)
    assert chat_text(chunks) == "日🙂"
    assert not any("\ufffd" in chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1])


def test_half_a_character_is_flushed_at_the_end(http: httpx.Client, loop: FakeLoop, tokenizer: Tokenizer) -> None:
    loop.answer(Script(tokens=tokenizer.encode("🙂").ids[:-1]))
    assert chat_text(chat_events(http)) == "\ufffd"


def test_usage_comes_last_and_only_when_asked(http: httpx.Client, loop: FakeLoop) -> None:
    loop.answer(Script(tokens=[40, 41, 42], cached_tokens=5))
    chunks = chat_events(http, stream_options={"include_usage": True})
    prompt = len(loop.submitted[0].prompt)
    assert chunks[-1] == DONE
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 3,
        "total_tokens": prompt + 3,
        "prompt_tokens_details": {"cached_tokens": 5},
    }
    assert [chunk["usage"] for chunk in chunks[:-2]] == [None] * (len(chunks) - 2)


def test_continuous_usage_counts_up(http: httpx.Client, loop: FakeLoop) -> None:
    loop.hold()
    loop.answer(Script(tokens=[40, 41, 42]))
    body = COMPLETION | {"stream_options": {"continuous_usage_stats": True}}
    with http.stream("POST", "/v1/completions", json=body) as response:
        stream = events(response)
        counts = []
        for _ in range(3):
            loop.step()
            counts.append(next(stream)["usage"]["completion_tokens"])
        rest = list(stream)
    assert counts == [1, 2, 3]
    assert rest[-1] == DONE
    assert all(chunk["choices"] for chunk in rest[:-1]), "no usage chunk of its own was asked for"


def test_an_error_in_mid_stream_is_the_last_event(http: httpx.Client, loop: FakeLoop) -> None:
    loop.hold()
    loop.answer(Script(tokens=[40, 41], ends_with=FinishReason.ERROR, error="out of memory"))
    with http.stream("POST", "/v1/completions", json=COMPLETION) as response:
        loop.step(2)
        chunks = list(events(response))
    assert chunks[-1] == {
        "error": {"message": "out of memory", "type": "server_error", "param": None, "code": "engine_error"}
    }
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None]


def test_the_openai_client_raises_on_an_error_in_mid_stream(client: openai.OpenAI, loop: FakeLoop) -> None:
    loop.hold()
    loop.answer(Script(tokens=[40, 41], ends_with=FinishReason.ERROR, error="out of memory"))
    stream = client.completions.create(model="tiny", prompt="hi", stream=True)
    loop.step(2)
    with pytest.raises(openai.APIError, match="out of memory"):
        list(stream)


def test_an_error_before_the_stream_began_is_a_status(http: httpx.Client, loop: FakeLoop) -> None:
    loop.answer(Script(tokens=[40], ends_with=FinishReason.ERROR, error="out of memory"))
    response = http.post("/v1/completions", json=COMPLETION | {"stream": False})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "engine_error"


def test_an_error_of_one_choice_ends_the_call_and_aborts_the_others(http: httpx.Client, loop: FakeLoop) -> None:
    loop.hold()
    loop.answer(Script(tokens=[40] * 9), Script(tokens=[41], ends_with=FinishReason.ERROR, error="bad block"))
    with http.stream("POST", "/v1/completions", json=COMPLETION | {"n": 2, "max_tokens": 9}) as response:
        loop.step()
        chunks = list(events(response))
    assert [chunk for chunk in chunks if "error" in chunk] == chunks[-1:]
    assert [abort.request_id for abort in loop.wait_for_aborts(1)] == [loop.submitted[0].id]


def test_each_choice_ends_once(http: httpx.Client, loop: FakeLoop) -> None:
    loop.answer(*(Script(tokens=[40 + number] * (number + 1)) for number in range(4)))
    with http.stream("POST", "/v1/completions", json=COMPLETION | {"n": 2, "prompt": ["a", "b"]}) as response:
        chunks = list(events(response))
    assert chunks.pop() == DONE
    ends = [(c["choices"][0]["index"], c["choices"][0]["finish_reason"]) for c in chunks]
    assert sorted(end for end in ends if end[1] is not None) == [(index, "length") for index in range(4)]
    for index in range(4):
        ending = ends.index((index, "length"))
        assert all(later[0] != index for later in ends[ending + 1 :])
    assert [len(text(chunks, index)) for index in range(4)] == [1, 2, 3, 4]


def test_an_empty_answer_still_has_a_terminal_chunk(http: httpx.Client, loop: FakeLoop, tokenizer: Tokenizer) -> None:
    loop.answer(Script(tokens=[id_of(tokenizer, "<|im_end|>")]))
    chunks = chat_events(http)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None, "stop"]
    assert chat_text(chunks) == ""


def test_echo_streams_the_prompt_first(http: httpx.Client, loop: FakeLoop, tokenizer: Tokenizer) -> None:
    loop.answer(Script(tokens=byte_tokens(tokenizer, "xy")))
    with http.stream("POST", "/v1/completions", json=COMPLETION | {"echo": True, "prompt": "Once"}) as response:
        chunks = list(events(response))
    assert text(chunks) == "Oncexy"
    assert chunks[0]["choices"][0]["text"].startswith("Once")


def test_streams_of_many_clients_do_not_mix(front: FrontProcess, loop: FakeLoop, tokenizer: Tokenizer) -> None:
    loop.hold()
    words = [f"{number:02d}" * 5 for number in range(20)]
    loop.answer(*(Script(tokens=byte_tokens(tokenizer, word)) for word in words))
    clients = [httpx.Client(base_url=front.url, timeout=20) for _ in words]
    responses = []
    for number, http in enumerate(clients):
        request = http.build_request("POST", "/v1/completions", json=COMPLETION)
        responses.append(http.send(request, stream=True))
        loop.wait_for_submissions(number + 1)
    loop.release()
    assert [text(list(events(response))) for response in responses] == words
    for http in clients:
        http.close()


async def test_async_openai_client_streams(front: FrontProcess, loop: FakeLoop, tokenizer: Tokenizer) -> None:
    loop.answer(Script(tokens=tokenizer.encode("Tokyo").ids))
    async with openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(parts) == "Tokyo"
