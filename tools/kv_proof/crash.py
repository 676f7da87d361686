"""A storing engine that is killed at any moment, and started again on the same file.

Each life begins with the next turns of all conversations of the life before, whose KV is on the disk alone, and goes on
with new ones from two clients until SIGKILL comes, at a random moment. *Committed* are the blocks of new conversations
that the engine's metrics count as stored on the disk when they are read right before the kill: no more than there are,
since they lag behind by up to a heartbeat. *Kept* are those whose records are whole in the file after the kill, *hit*
those that next turns find in the next life, at least nine in ten after every kill. The disk is full after some lives,
so that slots are written again and again, and what next turns add must make room of older blocks than those.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import httpx
import torch
from tools.kv_proof import tiny_model
from tools.kv_proof.conversations import SENTENCES
from tools.kv_proof.records import verify
from tools.kv_proof.reference import Expected, Reference, match
from tools.kv_proof.serving import Room, TieredEngine
from tools.live.rig import NAME

from tidelane.engine.http.tokenizer import Tokenizer
from tidelane.engine.kv.keys import Key, chain, root
from tidelane.engine.kv.page_file import PAGE
from tidelane.engine.kv.slot_file import FILE_NAME
from tidelane.engine.model.loading import LoadedModel, kv_namespace, load

LEAST_HIT = 0.9
_CLIENTS = 2
_TOLD_EVERY = 10
_KILLED_AFTER_TOKENS = (1, 350)  # of all clients; they ask for some 400
_THEN_WITHIN_S = 0.3
_ANSWER_WITHIN_S = 300.0
# Fewer than tell the engine how fast the disk is: what it thinks of that would decide what is fetched.
_MOST_ASKED = 20
_SENTENCES_EACH = (1, 3)
_ANSWER_TOKENS = (8, 32)
_NEXT_TURN = "\nGo on.\n"
_NEXT_TOKENS = 6
_POOL_BLOCKS, _HOST_BLOCKS, _DISK_BLOCKS = 120, 240, 1000


@dataclass(slots=True)
class Said:
    """A prompt, and what has come of its answer."""

    prompt: str
    new_tokens: int
    answer: str = ""
    ended: bool = False
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Life:
    """`lived_s`: from the first new conversation to the kill; `found_at_start` of the next life, by its own count;
    `cut`: streams that the kill cut short; `evicted`: blocks on the disk, of any age, that made room for what the next
    turns added; `torn`: records that the kill left over bytes not their own."""

    lived_s: float
    found_at_start: int
    answered: int
    cut: int
    committed: int
    kept: int
    hit: int
    evicted: int
    torn: int
    tokens: int
    ties: int


@dataclass(slots=True)
class _Last:
    """The life that was killed last."""

    asked: list[Said]
    committed: int
    lived_s: float
    kept: int = 0
    torn: int = 0


@dataclass(slots=True)
class Crashed:
    lives: list[Life] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def committed(self) -> int:
        return sum(life.committed for life in self.lives)

    @property
    def kept(self) -> int:
        return sum(min(life.kept, life.committed) for life in self.lives)

    @property
    def hit(self) -> int:
        return sum(min(life.hit, life.committed) for life in self.lives)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`encode` gives a token for each character of a text, but for `banned` ones, which no text has; `names` are those
    of the whole blocks of some tokens."""

    source: str
    encode: Callable[[str], tuple[int, ...]]
    banned: tuple[int, ...]
    names: Callable[[Sequence[int]], list[Key]]
    block_tokens: int
    block_bytes: int


def tiny(folder: Path, seed: int) -> tuple[ServedModel, LoadedModel]:
    """A random one, written to `folder`."""
    tiny_model.save(folder, seed)
    loaded = load(folder, "float32", None, torch.device("cpu"))
    tokenizer, layout = Tokenizer.load(folder, lambda: datetime.now(tz=UTC)), loaded.facts.kv_layout

    def encode(text: str) -> tuple[int, ...]:
        return tokenizer.encode(text, len(text))

    def names(tokens: Sequence[int]) -> list[Key]:
        whole = tokens[: len(tokens) // layout.block_tokens * layout.block_tokens]
        return chain(root(kv_namespace(loaded.facts), ""), whole, layout.block_tokens)

    sizes = (layout.block_tokens, layout.block_bytes)
    return ServedModel(f"file://{folder}", encode, tiny_model.NOT_TEXT, names, *sizes), loaded


async def crash(
    model: ServedModel, reference: Reference, folder: Path, kills: int, seed: int, tell: Callable[[str, int, int], None]
) -> Crashed:
    """KV lies in `folder`."""
    chance = random.Random(seed)
    began_s = time.monotonic()
    told = Crashed()
    last: _Last | None = None
    torn: frozenset[int] = frozenset()
    for number in range(kills + 1):
        tell(f"Killed {number - number % _TOLD_EVERY} times or more", number, kills)
        with _engine(model, folder) as engine:
            await engine.served.until_ready()
            if last is not None:
                life, faults = await _next_turns(engine, model, reference, last)
                told.lives.append(life)
                told.faults += [f"after kill {number}: {fault}" for fault in faults]
            if number == kills:
                await engine.end()
                break
            last = await _until_killed(engine, model, number, chance)
        records = verify(engine.kv / FILE_NAME, model.block_bytes)
        names = {name for said in last.asked for name in model.names(model.encode(said.prompt + said.answer))}
        last.kept, last.torn = len(names & records.whole), len(records.torn - torn)
        torn = records.torn
    told.seconds = time.monotonic() - began_s
    return told


async def _next_turns(
    engine: TieredEngine, model: ServedModel, reference: Reference, last: _Last
) -> tuple[Life, list[str]]:
    """What the last life comes to, now that its conversations go on; and what is not as it must be."""
    found = await engine.served.metric(f'kv_tier_blocks{{model_name="{NAME}",state="idle",tier="disk"}}')
    turns = [Said(said.prompt + said.answer + _NEXT_TURN, _NEXT_TOKENS) for said in last.asked]
    await _one_after_another(engine, model, turns)
    answers = [*last.asked, *turns]
    tokens, ties, faults = _compared(model, reference, answers)
    faults += [f"no end came to {said.prompt!r}" for said in turns if not said.ended]
    hit = sum(said.cached_tokens for said in turns) // model.block_tokens
    evicted = int(await engine.served.metric(f'kv_evictions_total{{model_name="{NAME}",tier="disk"}}'))
    if last.kept < LEAST_HIT * last.committed:
        faults.append(f"{last.kept} of {last.committed} committed blocks were in the file")
    if hit < LEAST_HIT * last.committed:
        faults.append(f"{hit} of {last.committed} committed blocks were hit; {evicted} on the disk had made room")
    if last.torn > 1:  # one thread writes
        faults.append(f"{last.torn} records were torn at once")
    cut = sum(not said.ended for said in last.asked)
    life = Life(
        lived_s=last.lived_s,
        found_at_start=int(found),
        answered=len(answers) - cut,
        cut=cut,
        committed=last.committed,
        kept=last.kept,
        hit=hit,
        evicted=evicted,
        torn=last.torn,
        tokens=tokens,
        ties=ties,
    )
    return life, faults


def _engine(model: ServedModel, folder: Path) -> TieredEngine:
    block_bytes = model.block_bytes
    room = Room(_POOL_BLOCKS * block_bytes, _HOST_BLOCKS * block_bytes, _DISK_BLOCKS * (block_bytes + PAGE))
    return TieredEngine(folder, room, model=model.source)


async def _until_killed(engine: TieredEngine, model: ServedModel, life: int, chance: random.Random) -> _Last:
    stored = await _settled(engine)
    began_s = time.monotonic()
    planned, asked = iter(_conversations(life, chance)), list[Said]()
    # A moment by what has been answered, so that it is while the engine works, however slow the machine.
    answered, until_tokens = asyncio.Event(), chance.randint(*_KILLED_AFTER_TOKENS)

    def heard() -> None:
        if sum(len(said.answer) for said in asked) >= until_tokens:
            answered.set()

    async def keep_asking(client: httpx.AsyncClient) -> None:
        for said in planned:  # which the clients share
            asked.append(said)
            await _ask(client, model, said, heard)
            if not said.ended:
                return

    async with httpx.AsyncClient(base_url=engine.served.url, timeout=_ANSWER_WITHIN_S) as client:
        clients = asyncio.gather(*(keep_asking(client) for _ in range(_CLIENTS)))
        await asyncio.wait((clients, asyncio.ensure_future(answered.wait())), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(chance.uniform(0, _THEN_WITHIN_S))  # so that stores, too, are cut short anywhere
        committed = await engine.moved("moved_blocks", "store") - stored
        engine.kill()
        answered.set()
        await clients
    return _Last(asked, int(committed), time.monotonic() - began_s)


def _conversations(life: int, chance: random.Random) -> list[Said]:
    """No two begin alike."""
    return [
        Said(
            f"{life}.{number} {' '.join(chance.choices(SENTENCES, k=chance.randint(*_SENTENCES_EACH)))}\n",
            chance.randint(*_ANSWER_TOKENS),
        )
        for number in range(_MOST_ASKED)
    ]


async def _settled(engine: TieredEngine) -> float:
    """Blocks stored on the disk, once no more are being stored of what was asked so far."""
    await engine.served.until_idle()
    before = -1.0
    async with asyncio.timeout(_ANSWER_WITHIN_S):
        while (stored := await engine.moved("moved_blocks", "store")) != before:
            before = stored
            await asyncio.sleep(0.5)  # two heartbeats
    return stored


async def _one_after_another(engine: TieredEngine, model: ServedModel, turns: Sequence[Said]) -> None:
    async with httpx.AsyncClient(base_url=engine.served.url, timeout=_ANSWER_WITHIN_S) as client:
        for said in turns:
            await _ask(client, model, said)


async def _ask(
    client: httpx.AsyncClient, model: ServedModel, said: Said, heard: Callable[[], None] = lambda: None
) -> None:
    """Until the answer or the engine ends."""
    bias = {str(token): -100 for token in model.banned}
    body = {
        "model": NAME, "prompt": said.prompt, "max_tokens": said.new_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True}, "logit_bias": bias,
    }  # fmt: skip
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                return
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    said.ended = True
                elif line.startswith("data: "):
                    _take(said, json.loads(line.removeprefix("data: ")))
                    heard()
    except httpx.TransportError:
        return  # it was killed; what came before is the beginning of an answer


def _take(said: Said, chunk: dict[str, object]) -> None:
    choices, usage = chunk.get("choices"), chunk.get("usage")
    if isinstance(choices, list):
        said.answer += "".join(choice["text"] for choice in choices)
    if isinstance(usage, dict):
        said.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]


def _compared(model: ServedModel, reference: Reference, answers: Sequence[Said]) -> tuple[int, int, list[str]]:
    """Tokens that are equal, near ties that fell otherwise, and what is wrong."""
    expected: list[Expected] = reference.answers([(model.encode(said.prompt), said.new_tokens) for said in answers])
    tokens = ties = 0
    wrong = []
    for said, theirs in zip(answers, expected, strict=True):
        found = match(model.encode(said.answer), theirs)
        tokens += found.equal
        ties += found.tied
        if found.wrong:
            wrong.append(f"{said.prompt!r}: the answer is wrong from token {found.equal} on")
    return tokens, ties, wrong
