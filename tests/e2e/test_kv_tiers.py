"""`tidelane serve` as a process: KV in all tiers, disks that fail, and more work than there is room for."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest

from .serving import Served, free_port, serve_command, text_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


async def test_the_next_turn_of_a_conversation_finds_its_history(served: Served) -> None:
    await served.until_ready()
    turn = {"role": "user", "content": "Tell me of the tides. " * 20}
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=300) as client:

        async def ask(messages: list[Any], **extra: str) -> tuple[str, int, int]:
            answer = await client.chat.completions.create(
                model="chat",
                messages=messages,
                max_tokens=40,
                temperature=0,
                extra_body={"ignore_eos": True, **extra},
            )
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            cached = answer.usage.prompt_tokens_details.cached_tokens
            return answer.choices[0].message.content or "", answer.usage.prompt_tokens, cached or 0

        first, prompt_tokens, cached = await ask([turn])
        assert cached == 0
        # Half a token may be the end of the first answer and the beginning of what is said next.
        history = [turn, {"role": "assistant", "content": first}, {"role": "user", "content": "Go on."}]
        _, _, cached = await ask(history)
        assert cached >= prompt_tokens // 16 * 16
        assert (await ask([turn]))[::2] == (first, (prompt_tokens - 1) // 16 * 16)
        assert (await ask([turn], cache_salt="another"))[::2] == (first, 0)
    await served.until_idle()
    hits = await served.metric("prefix_cache_hits_total")
    assert hits >= 2 * (prompt_tokens // 16 * 16)


@pytest.mark.parametrize(("held_as", "host_memory", "alike"), [("auto", 128 << 20, 60), ("int8", 34 << 20, 20)])
async def test_what_has_no_room_on_the_device_comes_back_from_host_memory(
    tmp_path: Path, held_as: str, host_memory: int, alike: int
) -> None:
    port = free_port()
    # Room for some 700 tokens on the device, and for four times that below.
    command = [*serve_command(port, tmp_path), "--kv-pool-memory", str(32 << 20)]
    command += ["--kv-host-memory", str(host_memory), "--kv-dtype", held_as]
    with subprocess.Popen(command) as process:
        try:
            engine = Served(process, port)
            await engine.until_ready()
            async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", timeout=300) as client:
                prompts = [f"{name} " + "has much to tell of the sea. " * 50 for name in ("Ada", "Ben", "Cleo", "Dan")]
                first = [await text_of(client, prompt, 30) for prompt in prompts]
                await engine.until_idle()
                hits = await engine.metric("prefix_cache_hits_total")
                again = [await text_of(client, prompt, 30) for prompt in prompts]
                await engine.until_idle()
            # Summed in other batches, or rounded, so that a near-tie may flip late in a text.
            assert [text[:alike] for text in again] == [text[:alike] for text in first]
            assert await engine.metric("prefix_cache_hits_total") - hits > 4 * 300
            tier, loaded, evictions = await engine.metrics(
                'kv_tier_blocks{model_name="chat",state="idle",tier="host"}',
                'kv_moved_blocks_total{model_name="chat",tier="host",way="load"}',
                'kv_evictions_total{model_name="chat",tier="device"}',
            )
            assert tier > 60
            assert loaded > 60
            assert evictions > 60
        finally:
            process.terminate()
            assert process.wait(60) == 0


async def test_an_engine_killed_and_started_again_finds_its_kv_on_disk(tmp_path: Path) -> None:
    port = free_port()
    folder = tmp_path / "kv"
    disk = ("--kv-disk-memory", str(256 << 20), "--kv-disk-folder", str(folder))
    command = [*serve_command(port, tmp_path), "--kv-host-memory", str(64 << 20), *disk]
    prompts = [f"{name} " + "has much to tell of the sea. " * 50 for name in ("Ada", "Ben")]
    spilled = 'kv_moved_blocks_total{model_name="chat",tier="disk",way="store"}'
    texts = []
    for life in range(2):
        with subprocess.Popen(command) as process:
            engine = Served(process, port)
            try:
                await engine.until_ready()
                async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", timeout=300) as client:
                    texts.append([await text_of(client, prompt, 30) for prompt in prompts])
                async with asyncio.timeout(60):
                    while await engine.metric(spilled) < (2 * 22 if life == 0 else 0):
                        await asyncio.sleep(0.1)  # the interval of a poll with a deadline
                hits = await engine.metric("prefix_cache_hits_total")
                fetched = await engine.metric('kv_moved_blocks_total{model_name="chat",tier="disk",way="load"}')
            finally:
                process.kill()
    assert [text[:60] for text in texts[0]] == [text[:60] for text in texts[1]]
    assert hits >= 2 * 320
    assert fetched >= 2 * 20
