"""Conversations in an engine of this process, with tiers below its pool or with room for all."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from tools.kv_proof.conversations import Conversation, rounds
from tools.kv_proof.replay import Diverged, Recorder, Replay, Step

from tidelane.engine.bench.in_process import InProcessEngine
from tidelane.engine.channel import Refused, Tokens
from tidelane.engine.config import ServeConfig
from tidelane.engine.kv.device import DevicePool
from tidelane.engine.kv.keys import TokenNames
from tidelane.engine.kv.slot_file import SlotLayout
from tidelane.engine.lanes.partition import partition_table
from tidelane.engine.model.loading import LoadedModel, kv_namespace
from tidelane.engine.request import Request, Sampling
from tidelane.engine.scheduling.plan import Objective, Scheduler
from tidelane.engine.scheduling.policies import live_policies
from tidelane.engine.slo import Slo
from tidelane.engine.tiers import Below, open_below
from tidelane.rpc import wire
from tidelane.rpc.wire import ExecutionMode

# A text, and how much of what is done: `Meter.tell`.
Tell = Callable[[str, int, int], None]
# No target holds anyone back, and slices are the smallest there are, so that prefill and decode overlap.
_ANY_TIME = Slo(ttft_s=0.001, tpot_s=100.0)
# By their time of arrival requests come later than now, so that none loses patience with the disk: KV that is not
# waited for is computed, and then there is nothing to compare.
_AHEAD_S = 3600.0
# Two cores named twice run the splits of a machine of four.
_FEWEST_UNITS = 4


@dataclass(frozen=True, slots=True)
class Case:
    mode: ExecutionMode
    at_once: int

    @property
    def name(self) -> str:
        return f"{self.mode}, " + (f"{self.at_once} at once" if self.at_once > 1 else "one after another")


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: tuple[int, ...]
    cached_tokens: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Moved:
    """Blocks by what became of them, of all tiers below the device."""

    loaded: int
    fetched: int
    left_device: int
    left_host: int


@dataclass(frozen=True, slots=True)
class Run:
    requests: tuple[tuple[Request, ...], ...]  # by round
    answers: Mapping[str, Answer]
    steps: tuple[Step, ...]
    moved: Moved
    leaked_blocks: int


@dataclass(frozen=True, slots=True)
class Bench:
    """What all cases share."""

    loaded: LoadedModel
    cores: tuple[int, ...]
    talks: tuple[Conversation, ...]
    folder: Path
    seed: int

    @property
    def units(self) -> tuple[int, ...]:
        return self.cores if len(self.cores) >= _FEWEST_UNITS else self.cores * 2

    def blocks(self, talks: Sequence[Conversation]) -> int:
        """That they take at their ends."""
        return sum(self.loaded.facts.kv_layout.blocks_for(talk.tokens) for talk in talks)


def with_tiers(bench: Bench, case: Case, tell: Tell) -> Run:
    every, longest = bench.blocks(bench.talks), bench.blocks((max(bench.talks, key=lambda talk: talk.tokens),))
    # Room for those that run, if they are of usual length: long ones wait for each other. The disk is for all.
    pool_blocks = max(every * case.at_once // len(bench.talks), longest) + 2 * case.at_once
    host_blocks = max(every // 3, pool_blocks + every // 4)
    facts = bench.loaded.facts
    block_bytes = facts.kv_layout.block_bytes
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-proof-", dir=bench.folder)))
        config = ServeConfig(
            model=str(facts.folder),
            model_store=folder,
            served_name="kv-proof",
            objective=wire.Objective(_ANY_TIME, case.mode),
            kv_host_bytes=host_blocks * block_bytes,
            kv_disk_bytes=SlotLayout(block_bytes, every + every // 4).file_bytes,
            kv_disk_folder=folder,
        )

        def tiers(pool: DevicePool, notify: Callable[[], None]) -> Below:
            # Without the size of a record no fetch is predicted to take time: a slow disk is to be used, too.
            return replace(open_below(config, facts, pool, notify), record_bytes=0)

        recorder = Recorder(_policy(bench, case))
        engine = stack.enter_context(_engine(bench, case, recorder, pool_blocks, open_tiers=tiers, watched=True))
        asked: list[tuple[Request, ...]] = []
        drawn = list(rounds(bench.talks, case.at_once, bench.seed))
        for number, talks in enumerate(drawn):
            tell(f"{case.name}: with tiers", number, len(drawn))
            answers = _answers(engine)
            asked.append(tuple(_request(bench, talk, turn, answers) for talk, turn in talks))
            _ask(engine, asked[-1])
        return _run(engine, asked, recorder.steps)


def resident(bench: Bench, case: Case, other: Run, tell: Tell) -> Run:
    """The same requests in a pool for all; by the launches of `other`, if it has any. Raises Diverged."""
    replayed = Replay(other.steps)
    policy: Scheduler = replayed if other.steps else _policy(bench, case)
    pool_blocks = bench.blocks(bench.talks) + len(bench.talks)
    batches = "the same launches" if other.steps else "its own batches"
    with _engine(bench, case, policy, pool_blocks) as engine:
        for number, asked in enumerate(other.requests):
            tell(f"{case.name}: resident, {batches}", number, len(other.requests))
            _ask(engine, asked)
        if replayed.done < len(other.steps):
            raise Diverged(f"{len(other.steps) - replayed.done} launches were left over")
        return _run(engine, other.requests, other.steps)


def _policy(bench: Bench, case: Case) -> Scheduler:
    return live_policies(partition_table(len(bench.units)))[case.mode]


def _engine(
    bench: Bench,
    case: Case,
    policy: Scheduler,
    blocks: int,
    *,
    open_tiers: Callable[[DevicePool, Callable[[], None]], Below] | None = None,
    watched: bool = False,
) -> InProcessEngine:
    facts = bench.loaded.facts
    return InProcessEngine(
        bench.loaded,
        cores=bench.units,
        mode=case.mode,
        kv_blocks=blocks,
        objective=Objective(_ANY_TIME),
        schedulers={case.mode: policy},
        names=TokenNames(kv_namespace(facts), facts.kv_layout.block_tokens),
        open_tiers=open_tiers,
        watched=watched,
    )


def _request(bench: Bench, talk: Conversation, turn: int, answers: Mapping[str, Answer]) -> Request:
    """All that was said so far, by both, and what is said now."""
    prompt: tuple[int, ...] = ()
    for at, each in enumerate(talk.turns[: turn + 1]):
        prompt += each.said
        if at < turn:
            prompt += answers[f"{talk.name} turn {at + 1}"].tokens
    # By a bias no text ends early, so that each is as long as was asked for.
    sampling = Sampling(
        seed=0, temperature=0.0, logit_bias=tuple((token, -1e9) for token in bench.loaded.facts.stop_token_ids)
    )
    name, new_tokens = f"{talk.name} turn {turn + 1}", talk.turns[turn].answer_tokens
    return Request(name, prompt, new_tokens, sampling, arrival_s=time.monotonic() + _AHEAD_S)


def _ask(engine: InProcessEngine, requests: Sequence[Request]) -> None:
    """All at once, until all that they have caused to be moved has been."""
    for request in requests:
        engine.submit(request)
    engine.run()


def _answers(engine: InProcessEngine) -> dict[str, Answer]:
    cached: dict[str, int] = {}
    for message in engine.desk.sent:
        if isinstance(message, Tokens) and message.new:
            cached.setdefault(message.request_id, message.cached_tokens)
    endings = engine.endings()
    found = {}
    for name, tokens in engine.answers().items():
        ending = endings.get(name)
        error = None
        if isinstance(ending, Refused):
            error = ending.message
        elif ending is None or ending.error is not None:
            error = "no end came" if ending is None else ending.error
        found[name] = Answer(tuple(tokens), cached.get(name, 0), error)
    return found


def _run(engine: InProcessEngine, asked: Sequence[tuple[Request, ...]], steps: Sequence[Step]) -> Run:
    cache = engine.ledger.pool
    moved = Moved(cache.loaded_blocks, cache.fetched_blocks, cache.device.evictions, cache.host.evictions)
    return Run(tuple(asked), _answers(engine), tuple(steps), moved, cache.total - cache.free)
