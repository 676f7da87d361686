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

BLOCK_BYTES = 737_280  # of 16 tokens of the built-in model
POOL = 32 << 20  # 45 blocks, of which 10 are for a stream
HOST = 96 << 20
LONG = "Of the sea there is much to tell. " * 66 + "In the end, the tide"  # some 600 tokens
NEW_TOKENS = 6


async def test_a_prompt_larger_than_the_pool_is_answered_beside_short_ones(tmp_path: Path) -> None:
    port = free_port()
    command = [*serve_command(port, tmp_path), "--kv-pool-memory", str(POOL), "--kv-host-memory", str(HOST)]
    with subprocess.Popen(command) as process:
        try:
            engine = Served(process, port)
            await engine.until_ready()
            async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", timeout=300) as client:
                await _serves(engine, client)
        finally:
            process.terminate()
            assert process.wait(60) == 0


async def _serves(engine: Served, client: openai.AsyncOpenAI) -> None:
    # What can never be is told at once, and with what to change.
    with pytest.raises(
        openai.BadRequestError, match=r"never fit: the KV cache holds 560 tokens on the device and 2176"
    ):
        await client.completions.create(model="chat", prompt=LONG, max_tokens=4000)
    long = asyncio.create_task(text_of(client, LONG, NEW_TOKENS))
    shorts = await asyncio.gather(*(text_of(client, f"{name} says", 8) for name in ("Ada", "Ben")))
    assert all(shorts)
    text = await long
    streamed = await engine.metric("kv_streamed_bytes_total")
    assert streamed > NEW_TOKENS * 34 * BLOCK_BYTES  # for each token at least all that is older
    # A client that leaves gives everything back, and the next is answered alike.
    chunks = await client.completions.create(
        model="chat", prompt=LONG, max_tokens=500, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    first = await anext(aiter(chunks))
    assert text.startswith(first.choices[0].text)
    await chunks.close()
    await engine.until_idle()
    figures = await engine.metrics(
        'kv_streams{model_name="chat",state="running"}',
        'kv_streams{model_name="chat",state="waiting"}',
        'kv_tier_blocks{model_name="chat",state="used",tier="host"}',
    )
    assert figures == [0, 0, 0]
    answer = await client.completions.create(
        model="chat", prompt=LONG, max_tokens=2, temperature=0, extra_body={"ignore_eos": True}
    )
    assert text.startswith(answer.choices[0].text)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 560
    details = answer.usage.prompt_tokens_details
    assert details is None or not details.cached_tokens
