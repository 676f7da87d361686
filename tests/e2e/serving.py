"""`tidelane serve` as a process, with the built-in model, and what a client needs of it."""

from __future__ import annotations

import sys
from pathlib import Path

import openai
from google.protobuf import json_format

from agent.engine_control_contract import objective
from tidelane.rpc import serving_pb2

MODEL = "builtin://smollm2-135m-instruct"


def serve_command(
    port: int,
    folder: Path,
    mode: serving_pb2.ExecutionMode = serving_pb2.LANES,
    late_requests: serving_pb2.LateRequests = serving_pb2.SERVE,
) -> list[str]:
    wanted = objective(revision=1)
    wanted.mode, wanted.late_requests = mode, late_requests
    wanted.slo.tpot_s = 2.0  # however slow the machine, streams run side by side
    return [
        *(sys.executable, "-m", "tidelane.cli.main", "serve", "--model", MODEL, "--served-name", "chat"),
        *("--port", str(port), "--control-socket", str(folder / "control")),
        *("--objective", json_format.MessageToJson(wanted), "--kv-pool-memory", str(512 << 20)),
    ]


async def text_of(client: openai.AsyncOpenAI, prompt: str, tokens: int) -> str:
    stream = await client.completions.create(
        model="chat", prompt=prompt, max_tokens=tokens, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    return "".join([chunk.choices[0].text async for chunk in stream])
