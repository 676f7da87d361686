from __future__ import annotations

import math

import httpx
import openai
from tokenizers import Tokenizer

from engine.http.fake_loop import FakeLoop, Script
from engine.http.front_process import FrontProcess
from engine.http.sse import events
from engine.http.tiny_model import id_of


def test_chat_answer(client: openai.OpenAI, loop: FakeLoop, tokenizer: Tokenizer) -> None:
    loop.answer(Script(tokens=[*tokenizer.encode("Paris").ids, id_of(tokenizer, "<|im_end|>")], cached_tokens=4))
    answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "capital?"}])
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert (choice.message.role, choice.message.content) == ("assistant", "Paris")
    assert (choice.finish_reason, choice.logprobs) == ("stop", None)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(loop.submitted[0].prompt)
    assert answer.usage.completion_tokens == len(tokenizer.encode("Paris").ids) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4


def test_chat_prompt_is_the_rendered_template(client: openai.OpenAI, loop: FakeLoop, tokenizer: Tokenizer) -> None:
    client.chat.completions.create(
        model="tiny",
        max_tokens=1,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {"role": "assistant", "content": "three"},
            {"role": "user", "content": "four"},
        ],
    )
    assert tokenizer.decode(loop.submitted[0].prompt, skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n"
        "<|im_start|>assistant\nthree<|im_end|>\n<|im_start|>user\nfour<|im_end|>\n<|im_start|>assistant\n"
    )


def test_chat_logprobs(client: openai.OpenAI, loop: FakeLoop, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙂").ids
    loop.answer(Script(tokens=ids))
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert bytes(byte for token in logprobs.content for byte in token.bytes or ()).decode() == "a🙂"
    assert [token.logprob for token in logprobs.content] == [-0.5] * len(ids)
    assert [[top.logprob for top in token.top_logprobs] for token in logprobs.content] == [[-0.5, -1.5]] * len(ids)
    assert loop.submitted[0].sampling.logprobs == 2


def test_top_logprobs_is_an_empty_list_when_not_asked_for(client: openai.OpenAI, loop: FakeLoop) -> None:
    loop.answer(Script(tokens=[40, 41]))
    answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], logprobs=True)
    assert answer.choices[0].logprobs is not None
    assert [token.top_logprobs for token in answer.choices[0].logprobs.content or ()] == [[], []]


def test_streamed_logprobs_add_up_to_the_whole_ones(http: httpx.Client, loop: FakeLoop, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab🙂c").ids
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 1}
    loop.answer(Script(tokens=ids), Script(tokens=ids))
    whole = http.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    with http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        choices = [chunk["choices"][0] for chunk in list(events(response))[:-1]]
    streamed = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]]
    assert streamed == whole
    for choice in choices:
        shown = "".join(token["token"] for token in (choice["logprobs"] or {"content": []})["content"])
        assert bool(shown) == bool(choice["delta"].get("content"))


def test_impossible_tokens_have_openais_least_logprob(http: httpx.Client, loop: FakeLoop) -> None:
    for logprob in (-math.inf, math.nan):
        loop.answer(Script(tokens=[40], logprob=logprob))
        answer = http.post("/v1/completions", json={"model": "tiny", "prompt": "x", "logprobs": 1})
        assert answer.json()["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


def test_completion_answer(client: openai.OpenAI, loop: FakeLoop, tokenizer: Tokenizer) -> None:
    loop.answer(Script(tokens=tokenizer.encode("Tokyo").ids))
    answer = client.completions.create(model="tiny", prompt="capital", max_tokens=20)
    assert answer.object == "text_completion"
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Tokyo", "length")
    assert answer.choices[0].logprobs is None
    assert loop.submitted[0].prompt == tuple(tokenizer.encode("capital").ids)


def test_legacy_logprobs_are_parallel_lists(client: openai.OpenAI, loop: FakeLoop, tokenizer: Tokenizer) -> None:
    ids = [token for letter in "ab" for token in tokenizer.encode(letter).ids]
    loop.answer(Script(tokens=ids))
    logprobs = client.completions.create(model="tiny", prompt="x", logprobs=2).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b"]
    assert logprobs.token_logprobs == [-0.5, -0.5]
    assert logprobs.text_offset == [0, 1]
    assert [len(top) for top in logprobs.top_logprobs or ()] == [2, 2]


def test_legacy_logprobs_name_parts_of_characters_apart(
    client: openai.OpenAI, loop: FakeLoop, tokenizer: Tokenizer
) -> None:
    loop.answer(Script(tokens=tokenizer.encode("🙂").ids))
    logprobs = client.completions.create(model="tiny", prompt="x", logprobs=1).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert all(token.startswith("bytes:\\x") for token in logprobs.tokens)
    assert bytes.fromhex("".join(logprobs.tokens).replace("bytes:", "").replace("\\x", "")).decode() == "🙂"


def test_legacy_logprobs_of_zero_have_no_alternatives(http: httpx.Client, loop: FakeLoop) -> None:
    answer = http.post("/v1/completions", json={"model": "tiny", "prompt": "x", "logprobs": 0, "max_tokens": 2}).json()
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] is None
    assert len(logprobs["token_logprobs"]) == 2
    assert loop.submitted[0].sampling.logprobs == 0


def test_what_lm_eval_sends_and_reads(http: httpx.Client, loop: FakeLoop) -> None:
    """It scores a continuation from the echoed prompt's log-probabilities, and drops the one generated token."""
    prompts = [[40, 41, 42, 43], [50, 51, 52]]
    body = {
        "model": "tiny",
        "prompt": prompts,
        "echo": True,
        "logprobs": 1,
        "max_tokens": 1,
        "temperature": 0,
        "seed": 1,
    }
    choices = http.post("/v1/completions", json=body).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    for choice, prompt in zip(choices, prompts, strict=True):
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"] == [None] + [-0.5] * len(prompt)
        assert logprobs["top_logprobs"][0] is None
        for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True):
            assert max(top, key=lambda name: top[name]) == token
        assert "".join(logprobs["tokens"]) == choice["text"]
    assert [request.sampling.prompt_logprobs for request in loop.submitted] == [1, 1]
    assert [request.prompt for request in loop.submitted] == [tuple(prompt) for prompt in prompts]


def test_echo_without_new_tokens(http: httpx.Client, loop: FakeLoop) -> None:
    for logprobs in (None, 1):
        body = {"model": "tiny", "prompt": "Once upon", "echo": True, "max_tokens": 0, "logprobs": logprobs}
        answer = http.post("/v1/completions", json=body).json()
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("Once upon", "length")
        assert answer["usage"]["completion_tokens"] == 0
        if logprobs is None:
            assert choice["logprobs"] is None
        else:
            assert "".join(choice["logprobs"]["tokens"]) == "Once upon"
    assert [request.max_new_tokens for request in loop.submitted] == [0, 0]


def test_echo_of_token_ids_is_their_text(client: openai.OpenAI, loop: FakeLoop, tokenizer: Tokenizer) -> None:
    loop.answer(Script(tokens=tokenizer.encode("!").ids))
    answer = client.completions.create(model="tiny", prompt=tokenizer.encode("naïve").ids, echo=True, max_tokens=1)
    assert answer.choices[0].text == "naïve!"


def test_prompts_in_all_four_forms(http: httpx.Client, loop: FakeLoop, tokenizer: Tokenizer) -> None:
    a, b = tuple(tokenizer.encode("a").ids), tuple(tokenizer.encode("b c").ids)
    for prompt, expected in [
        ("a", [a]), (["a", "b c"], [a, b]), (list(b), [b]), ([list(a), list(b)], [a, b]),
    ]:  # fmt: skip
        answer = http.post("/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 1}).json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
        assert [request.prompt for request in loop.submitted[-len(expected) :]] == expected
        assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_n_draws_differently_and_counts_the_prompt_once(client: openai.OpenAI, loop: FakeLoop) -> None:
    answer = client.completions.create(model="tiny", prompt=["a", "b"], n=3, max_tokens=2, seed=7)
    seeds = [request.sampling.seed for request in loop.submitted]
    assert seeds[:3] == seeds[3:]
    assert seeds[0] == 7
    client.completions.create(model="tiny", prompt="a", n=3, max_tokens=2, seed=8)
    others = [request.sampling.seed for request in loop.submitted[6:]]
    assert others[0] == 8
    assert len({*seeds, *others}) == 6, "copies of neighbouring seeds must not be each other's"
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 12)


def test_without_a_seed_each_request_draws_its_own(client: openai.OpenAI, loop: FakeLoop) -> None:
    for _ in range(2):
        client.completions.create(model="tiny", prompt="a", max_tokens=1)
    first, second = (request.sampling.seed for request in loop.submitted)
    assert first != second
    assert 0 <= first < 2**63


def test_sampling_fields_reach_the_loop(http: httpx.Client, loop: FakeLoop) -> None:
    body = {
        "model": "tiny", "prompt": "a", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1,
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": -0.3, "seed": -1,
        "logit_bias": {"5": -100, "6": 2}, "stop_token_ids": [9],
    }  # fmt: skip
    assert http.post("/v1/completions", json=body).status_code == 200
    (request,) = loop.submitted
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, 0.2, -0.3)
    assert sampling.logit_bias == ((5, -100.0), (6, 2.0))
    assert 0 <= sampling.seed < 2**63
    assert request.stop_token_ids == (9, *loop.facts.stop_token_ids)


def test_ignore_eos_leaves_only_the_clients_stop_tokens(http: httpx.Client, loop: FakeLoop) -> None:
    body = {"model": "tiny", "prompt": "a", "ignore_eos": True, "stop_token_ids": [9]}
    assert http.post("/v1/completions", json=body).status_code == 200
    assert loop.submitted[0].stop_token_ids == (9,)


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "tidelane")
    assert client.models.retrieve("tiny").id == "tiny"


def test_request_ids_are_echoed_or_made(http: httpx.Client, front: FrontProcess) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
    assert http.post("/v1/completions", json=body, headers={"X-Request-ID": "abc"}).headers["x-request-id"] == "abc"
    assert http.post("/v1/completions", json={}, headers={"X-Request-ID": "bad"}).headers["x-request-id"] == "bad"
    made = [http.post("/v1/completions", json=body).headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    with http.stream(
        "POST", "/v1/completions", json=body | {"stream": True}, headers={"X-Request-ID": "s"}
    ) as response:
        assert response.headers["x-request-id"] == "s"
        assert response.read()


def test_two_requests_with_one_id_do_not_mix(http: httpx.Client, loop: FakeLoop) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
    for _ in range(2):
        http.post("/v1/completions", json=body, headers={"X-Request-ID": "same"})
    first, second = loop.submitted
    assert first.id != second.id
