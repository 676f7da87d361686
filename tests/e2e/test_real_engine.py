"""`tidelane serve` as a process, with the built-in model: control, aborts, sudden death."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path

import grpc
import grpc.aio
import httpx
import openai
import psutil
import pytest
from tools.kv_proof.serving import Served, free_port

from agent.engine_control_contract import EngineControlContract, RunningEngine, StartEngine, objective
from engine.core.models import save
from engine.handover.processes import prefill_sides, runs
from tidelane.rpc import serving_pb2

from .serving import MODEL, serve_command, text_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class TestControl(EngineControlContract):
    @pytest.fixture
    async def start_engine(self, tmp_path: Path) -> AsyncIterator[StartEngine]:
        started: list[asyncio.subprocess.Process] = []

        async def start(extra: Sequence[str]) -> RunningEngine:
            port = free_port()
            process = await asyncio.create_subprocess_exec(*serve_command(port, tmp_path), *extra)
            started.append(process)
            return RunningEngine(process, tmp_path / "control", "127.0.0.1", port, initial_revision=1)

        yield start
        for process in started:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def leave_early(url: str, chance: random.Random) -> None:
    """One client that goes away at a random moment: while sending, queued, in prefill or in mid-stream."""
    body = {
        "model": "chat",
        "prompt": "word " * chance.randint(1, 300),
        "max_tokens": 200,
        "stream": chance.random() < 0.7,
        "ignore_eos": True,
    }
    with suppress(TimeoutError, httpx.HTTPError):
        async with (
            asyncio.timeout(chance.uniform(0.001, 8.0)),
            httpx.AsyncClient() as client,
            client.stream("POST", f"{url}/v1/completions", json=body) as response,
        ):
            async for _ in response.aiter_bytes():
                pass


async def test_200_clients_that_leave_free_all_blocks_and_disturb_nobody(served: Served) -> None:
    await served.until_ready()
    prompts = ["The capital of France is", "One, two, three, four,", "Water boils at"]
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=300) as client:
        expected = [await text_of(client, prompt, 60) for prompt in prompts]
        chance = random.Random(11)
        steady = [asyncio.create_task(text_of(client, prompt, 60)) for prompt in prompts]
        await asyncio.gather(*(leave_early(served.url, random.Random(chance.random())) for _ in range(200)))
        undisturbed = await asyncio.gather(*steady)
    # Another batch sums in another order, so that a near-tie may flip late in a text; the beginnings must agree.
    assert [text[:80] for text in undisturbed] == [text[:80] for text in expected]
    await served.until_idle()


async def within_two_seconds(client: httpx.AsyncClient, prompt: str) -> httpx.Response:
    """Asks for the first of three tokens so soon."""
    body = {"model": "chat", "prompt": prompt, "max_tokens": 3, "stream": True, "ignore_eos": True}
    return await client.post("/v1/completions", json=body, headers={"x-slo-ttft-ms": "2000"})


async def test_who_would_be_late_gets_a_429_instead_of_a_stream(tmp_path: Path) -> None:
    port = free_port()
    with subprocess.Popen(serve_command(port, tmp_path, late_requests=serving_pb2.REFUSE)) as process:
        try:
            engine = Served(process, port)
            await engine.until_ready()
            async with httpx.AsyncClient(base_url=engine.url, timeout=300) as client:
                # Each alone is on time, and all at once are far more than cores can prefill in that time. (None
                # begins like another: what one has computed would do for the rest.)
                prompts = [f"{number} " + "word " * 300 for number in range(60)]
                answers = await asyncio.gather(*(within_two_seconds(client, prompt) for prompt in prompts))
                await engine.until_idle()
                answers.append(await within_two_seconds(client, "word " * 300))
                await engine.until_idle()
            refused = await engine.metric('requests_refused_total{model_name="chat",reason="would_be_late"}')
        finally:
            process.kill()
    late = [answer for answer in answers if answer.status_code == 429]
    assert 0 < len(late) < len(answers)
    assert refused == len(late)
    assert answers[-1] not in late
    for answer in late:
        assert answer.json()["error"]["code"] == "would_be_late"
        assert 1 <= int(answer.headers["retry-after"]) <= 60
    for answer in [each for each in answers if each not in late]:
        assert answer.status_code == 200
        chunks = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert chunks.pop() == "[DONE]"
        assert [reason for chunk in chunks for reason in finish_reasons(chunk)] == ["length"]


def finish_reasons(chunk: str) -> list[str]:
    choices = json.loads(chunk)["choices"]
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]


async def test_killed_in_mid_stream_every_client_hears_of_it_and_nothing_stays(served: Served) -> None:
    await served.until_ready()
    family = psutil.Process(served.process.pid).children(recursive=True)

    async def listen() -> list[str]:
        body = {"model": "chat", "prompt": "Once", "max_tokens": 2000, "stream": True, "ignore_eos": True}
        lines: list[str] = []
        async with (
            httpx.AsyncClient(timeout=60) as client,
            client.stream("POST", f"{served.url}/v1/completions", json=body) as response,
        ):
            async for line in response.aiter_lines():
                if line:
                    lines.append(line)
                if len(lines) == 3:
                    heard.release()
        return lines

    heard = asyncio.Semaphore(0)
    listeners = [asyncio.create_task(listen()) for _ in range(4)]
    for _ in listeners:
        await heard.acquire()
    served.process.kill()
    for lines in await asyncio.gather(*listeners):
        assert lines[-1].startswith('data: {"error"')
        assert sum(line.startswith('data: {"error"') for line in lines) == 1
    gone, alive = await asyncio.to_thread(psutil.wait_procs, family, 5)
    assert alive == []
    assert len(gone) >= 1


async def test_two_processes_answer_as_one_and_survive_the_death_of_the_one_that_prefills(tmp_path: Path) -> None:
    prompts = ["The capital of France is", "One, two, three, four," * 40, "Water boils at"]
    texts: dict[serving_pb2.ExecutionMode, list[str]] = {}
    # One core for the one process, as each of the two has: then the same numbers are added in the same order.
    for mode, cores in ((serving_pb2.MIXED_BATCH, "0"), (serving_pb2.DISAGGREGATED, "0,1")):
        port = free_port()
        with subprocess.Popen([*serve_command(port, tmp_path, mode), "--cores", cores]) as process:
            try:
                engine = Served(process, port)
                await engine.until_ready()
                async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", timeout=300) as client:
                    texts[mode] = [await text_of(client, prompt, 40) for prompt in prompts]
                    if mode == serving_pb2.DISAGGREGATED:
                        await outlive_a_prefill_side(engine, client, texts[mode])
            finally:
                process.kill()
    assert texts[serving_pb2.DISAGGREGATED] == texts[serving_pb2.MIXED_BATCH]


async def outlive_a_prefill_side(engine: Served, client: openai.AsyncOpenAI, known: list[str]) -> None:
    """A stream that has its first token goes on; one that has none yet waits for the next process, and is answered."""
    (first,) = prefill_sides(engine.process.pid)
    stream = await client.completions.create(
        model="chat",
        prompt="The capital of France is",
        max_tokens=400,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    text = ""
    waiting: asyncio.Task[str] | None = None
    async for chunk in stream:
        text += chunk.choices[0].text
        if waiting is None:
            first.kill()
            waiting = asyncio.create_task(text_of(client, "Water boils at", 40))
    assert text.startswith(known[0])
    assert waiting is not None
    assert await waiting == known[2]
    (second,) = prefill_sides(engine.process.pid)
    assert second.pid != first.pid
    await engine.until_idle()
    engine.process.kill()
    async with asyncio.timeout(2):
        while runs(second):
            await asyncio.sleep(0.01)  # the interval of a poll with a deadline


async def test_the_mode_of_two_processes_is_settled_at_the_start(tmp_path: Path) -> None:
    port = free_port()
    process = await asyncio.create_subprocess_exec(*serve_command(port, tmp_path))
    engine = RunningEngine(process, tmp_path / "control", "127.0.0.1", port, initial_revision=1)
    try:
        await engine.until(lambda _: True)
        wanted = objective(revision=2)
        wanted.mode = serving_pb2.DISAGGREGATED
        with pytest.raises(grpc.aio.AioRpcError, match="Disaggregated needs another start") as refused:
            await engine.stub.SetObjective(wanted)
        assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    finally:
        process.kill()
        await process.wait()
        await engine.channel.close()


def test_two_processes_on_one_core_are_refused_with_the_reason(tmp_path: Path) -> None:
    command = [*serve_command(free_port(), tmp_path, serving_pb2.DISAGGREGATED), "--cores", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert ended.returncode == 78
    assert "execution mode Disaggregated needs two cores" in ended.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("config.json", '{"model_type": "llama", "num_hidden_layers": "x"}', r"config\.json: .*'num_hidden_layers'"),
        ("tokenizer.json", "", r"the HTTP front cannot load the model's tokenizer: "),
    ],
)
def test_a_model_that_cannot_be_served_ends_the_engine_with_the_reason(
    tmp_path: Path, file: str, content: str, reason: str
) -> None:
    folder = save("llama", tmp_path / "llama")
    (folder / file).write_text(content)
    command = [argument.replace(MODEL, f"file://{folder}") for argument in serve_command(free_port(), tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert ended.returncode == 78
    (last_word,) = [line for line in ended.stderr.splitlines() if "cannot serve" in line]
    assert re.search(f"ERROR tidelane.engine.serve cannot serve: .*{reason}", last_word)
    assert "Traceback" not in ended.stderr
