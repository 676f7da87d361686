"""`tidelane serve` as a process: a prompt larger than the device's pool is answered from host memory."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import openai
import pytest
from tools.kv_proof.serving import Served, free_port

from .serving import serve_command, text_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

POOL = 32 << 20  # 45 blocks of the built-in model, 720 tokens
HOST = 128 << 20  # 182 blocks
LONG = "Of the sea there is much to tell. " * 100 + "In the end, the tide"
NEW_TOKENS = 16
ALIKE = 25  # characters: summed in another order, so that a near-tie may flip late in a text


async def test_a_prompt_larger_than_the_pool_is_answered_beside_short_ones(tmp_path: Path) -> None:
    texts = []
    for pool, host in ((256 << 20, 0), (POOL, HOST)):
        port = free_port()
        command = [*serve_command(port, tmp_path), "--kv-pool-memory", str(pool)]
        command += ["--kv-host-memory", str(host)] if host else []
        with subprocess.Popen(command) as process:
            engine = Served(process, port)
            try:
                await engine.until_ready()
                async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", timeout=300) as client:
                    texts.append(await text_of(client, LONG, NEW_TOKENS))
                    if host:
                        await _beside_others(engine, client)
            finally:
                process.terminate()
                assert process.wait(60) == 0
    assert texts[0][:ALIKE] == texts[1][:ALIKE]


async def _beside_others(engine: Served, client: openai.AsyncOpenAI) -> None:
    streamed = await engine.metric("kv_streamed_bytes_total")
    assert streamed > NEW_TOKENS * 40 * 737_280  # at least all of the older KV for each token
    chunks = await client.completions.create(
        model="chat", prompt=LONG, max_tokens=200, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    first = await anext(aiter(chunks))
    assert first.choices[0].text
    assert await engine.metric('kv_streams{model_name="chat",state="running"}') == 1
    shorts = await asyncio.gather(*(text_of(client, f"{name} says", 8) for name in ("Ada", "Ben")))
    assert all(shorts)
    await chunks.close()  # the client leaves
    await engine.until_idle()
    running, waiting, pinned = await engine.metrics(
        'kv_streams{model_name="chat",state="running"}',
        'kv_streams{model_name="chat",state="waiting"}',
        'kv_tier_blocks{model_name="chat",state="used",tier="host"}',
    )
    assert (running, waiting, pinned) == (0, 0, 0)
    answer = await client.completions.create(
        model="chat", prompt=LONG, max_tokens=2, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2
    details = answer.usage.prompt_tokens_details
    assert details is None or not details.cached_tokens
    with pytest.raises(
        openai.BadRequestError,
        match="can never fit: the KV cache holds 544 tokens on the device and 2912 in host memory",
    ):
        await client.completions.create(model="chat", prompt=LONG, max_tokens=5000)
