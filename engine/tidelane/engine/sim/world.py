"""A trace against engines in virtual time. The same arguments give the same result to the bit."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter

from tidelane.engine.bench.traffic import Arrival, Traffic
from tidelane.engine.channel import RefusalReason
from tidelane.engine.kv.retention import Guesses
from tidelane.engine.request import Request, Sampling, ServiceTier
from tidelane.engine.scheduling.plan import Objective, Scheduler
from tidelane.engine.sim.clock import VirtualClock
from tidelane.engine.sim.engine import VirtualEngine
from tidelane.engine.sim.gaps import GapHistogram
from tidelane.engine.sim.machine import Machine
from tidelane.engine.sim.noise import Noise
from tidelane.engine.sim.shares import Share
from tidelane.engine.slo import Slo, Timeline
from tidelane.engine.usage import Use

# Turns in a row that change nothing, with requests at hand and nothing to come: far beyond any bounded wait.
MOST_IDLE_TURNS = 20_000

_GREEDY = Sampling(seed=0, temperature=0.0)


class Stalled(RuntimeError):
    """Requests wait and the policy launches nothing: its fault."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one arrival: a timeline, or the reason of its refusal."""

    arrival: Arrival
    timeline: Timeline | None
    refusal: RefusalReason | None = None


@dataclass(frozen=True, slots=True)
class Ahead:
    """Tokens whose KV was brought to a tier for prompts that might come. Of the rest it is not known yet."""

    tokens: int
    useful: int
    wasted: int


NOTHING_AHEAD = Ahead(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Found:
    """How many of the `prompt_tokens` needed no computing; and how many came from host memory, and to there from the
    disk. Of these came ahead of their prompts: to host memory, and of use or not; to the device, and of use or not."""

    prompt_tokens: int
    cached_tokens: int
    loaded_tokens: int
    fetched_tokens: int
    fetched_ahead: Ahead = NOTHING_AHEAD
    loaded_ahead: Ahead = NOTHING_AHEAD


@dataclass(frozen=True, slots=True)
class Replay:
    """`answers` in order of arrival. `busy_s` and `launches` are summed over engines; `shares` are the first one's."""

    answers: tuple[Answer, ...]
    gaps: GapHistogram
    shares: tuple[Share, ...]
    busy_s: Mapping[Use, float]
    launches: int
    preemptions: int
    border_moves: int
    ended_s: float
    gpus: int
    found: Found


@dataclass(frozen=True, slots=True)
class Settings:
    """`engines` machines share the traffic: each request goes to the one with the least left to do.

    `noise` is the standard deviation of the logarithm of step times. `refuse_late` and shares: as in the objective.
    """

    slo: Slo
    engines: int = 1
    queue_limit: int = 1_000_000
    seed: int = 0
    noise: float = 0.0
    refuse_late: bool = False
    min_decode_share: float = 0.0
    max_decode_share: float = 1.0

    @property
    def objective(self) -> Objective:
        return Objective(self.slo, self.min_decode_share, self.max_decode_share, self.refuse_late)


def replay(traffic: Traffic, machine: Machine, scheduler: Callable[[], Scheduler], settings: Settings) -> Replay:
    """Run `traffic` until its last request has ended. `scheduler` makes one policy for each engine."""
    clock = VirtualClock()
    engines = [
        VirtualEngine(
            machine,
            scheduler(),
            settings.objective,
            clock=clock,
            queue_limit=settings.queue_limit,
            bucket_s=max(traffic.duration_s, 1.0) / 60,
            noise=Noise(settings.noise, f"{settings.seed}:{number}"),
            hashed_tokens=traffic.hashed_tokens,
        )
        for number in range(settings.engines)
    ]
    with _no_garbage_collection():
        _run(engines, clock, _requests(traffic))
    return _gather(engines, traffic, clock.now_s, machine.gpus * settings.engines)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A replay makes millions of objects and hardly a cycle: to look for those takes an eighth of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _requests(traffic: Traffic) -> Iterator[tuple[Request, Sequence[int]]]:
    """Made when due, since a trace of long prompts would fill the memory. Ids sort as their requests arrive."""
    for number, arrival in enumerate(traffic.arrivals):
        request = Request(
            id=_name(number),
            prompt=(0,) * arrival.input_tokens,
            max_new_tokens=arrival.output_tokens,
            sampling=_GREEDY,
            arrival_s=arrival.at_s,
            tier=ServiceTier(arrival.tier) if arrival.tier else ServiceTier.DEFAULT,
        )
        yield request, arrival.hash_ids


def _name(number: int) -> str:
    return f"{number:07}"


def _run(engines: list[VirtualEngine], clock: VirtualClock, requests: Iterator[tuple[Request, Sequence[int]]]) -> None:
    coming = next(requests, None)
    idle_turns = 0
    while True:
        # The first of several at the same time, so that runs can be repeated.
        first = min(engines, key=_NEXT_TURN) if len(engines) > 1 else engines[0]
        due = [first]
        if coming is not None and coming[0].arrival_s <= first.next_turn_s:
            clock.now_s, due = coming[0].arrival_s, []
            while coming is not None and coming[0].arrival_s == clock.now_s:
                least_to_do = min(engines, key=_OPEN_TOKENS)
                least_to_do.submit(*coming)
                if least_to_do not in due:
                    due.append(least_to_do)
                coming = next(requests, None)
        elif coming is None and all(each.ledger.empty for each in engines):
            return
        else:
            clock.now_s = first.next_turn_s
        for engine in due:
            engine.turn(coming[0].arrival_s if coming is not None else math.inf)
        idle_turns = 0 if coming is not None or any(each.working for each in engines) else idle_turns + 1
        if idle_turns > MOST_IDLE_TURNS:
            raise Stalled(_stuck(engines, clock.now_s))


_NEXT_TURN = attrgetter("next_turn_s")
_OPEN_TOKENS = attrgetter("desk.open_tokens")


def _stuck(engines: list[VirtualEngine], now_s: float) -> str:
    state = next(each for each in engines if not each.ledger.empty).ledger.state()
    return (
        f"the policy launches nothing since long before {now_s:.0f} s: {len(state.queued)} queued, "
        f"{len(state.prefilling)} prefilling, {len(state.decoding)} decoding, {state.pool.free_blocks} blocks free, "
        f"next pass {state.next_job}, first in the queue {state.queued[:1]}"
    )


def _gather(engines: list[VirtualEngine], traffic: Traffic, ended_s: float, gpus: int) -> Replay:
    gaps = GapHistogram()
    for engine in engines:
        gaps.merge(engine.desk.gaps)
    endings = {ending.id: ending for engine in engines for ending in engine.desk.endings}
    answers = []
    for number, arrival in enumerate(traffic.arrivals):
        ending = endings[_name(number)]
        answers.append(Answer(arrival, ending.timeline, ending.refusal))
    return Replay(
        answers=tuple(answers),
        gaps=gaps,
        shares=engines[0].shares.shares(),
        busy_s={use: sum(engine.usage.seconds[use] for engine in engines) for use in Use},
        launches=sum(engine.executor.launches for engine in engines),
        preemptions=sum(engine.ledger.preemptions for engine in engines),
        border_moves=sum(engine.usage.border_moves for engine in engines),
        ended_s=ended_s,
        gpus=gpus,
        found=Found(
            prompt_tokens=sum(arrival.input_tokens for arrival in traffic.arrivals),
            cached_tokens=sum(engine.desk.cached_tokens for engine in engines),
            loaded_tokens=sum(engine.loaded_tokens for engine in engines),
            fetched_tokens=sum(engine.fetched_tokens for engine in engines),
            fetched_ahead=_ahead(engines, lambda engine: engine.ledger.pool.host.guesses),
            loaded_ahead=_ahead(engines, lambda engine: engine.ledger.pool.device.guesses),
        ),
    )


def _ahead(engines: list[VirtualEngine], guesses: Callable[[VirtualEngine], Guesses]) -> Ahead:
    each = [(engine.block_tokens, guesses(engine)) for engine in engines]
    return Ahead(
        tokens=sum(tokens * told.brought for tokens, told in each),
        useful=sum(tokens * told.useful for tokens, told in each),
        wasted=sum(tokens * told.wasted for tokens, told in each),
    )
