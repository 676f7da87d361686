"""What simulation says of services: asked for in the background, one at a time, and kept while nothing has changed.

A question is a service's traffic and machine, its replicas, and an objective. Traffic wavers all the time: a service
keeps the one that it was last asked with until it differs visibly, so that a steady service costs nothing and its
status stands still.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tidelane.engine.workload import Lengths, Sketch
from tidelane.operator.observation import Node
from tidelane.operator.resources import ObjectRef
from tidelane.rpc import serving_pb2
from tidelane.rpc.wire import Objective, Workload, workload_from_wire

log = logging.getLogger(__name__)

# Fewer requests tell nothing of a percentile.
FEWEST_REQUESTS: Final = 20
_VISIBLE: Final = 0.15
_CHANCE: Final = 3.0  # standard deviations
_KEPT: Final = 4096


@dataclass(frozen=True, slots=True)
class Question:
    """`workload` is the sum of those of `replicas` replicas."""

    workload: Workload
    objective: Objective
    replicas: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """`attainment` in percent; latencies at the percentile asked for, None of no answers. `replicas` are the fewest
    that would meet the targets; None: more than were tried."""

    attainment: int
    ttft_s: float | None
    tpot_s: float | None
    replicas: int | None


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Why there is no forecast."""

    why: str


Answer = Forecast | Unanswered


@dataclass(frozen=True, slots=True)
class Traffic:
    """What comes to a service: the sum over `replicas` replicas that were asked for something lately."""

    workload: Workload
    replicas: int

    def asking(self, objective: Objective) -> Question:
        return Question(self.workload, replace(objective, revision=0), self.replicas)


def traffic_of(nodes: Mapping[str, Node]) -> Mapping[ObjectRef, Traffic]:
    """By service. What cannot be read is left out: agents may be newer than this operator."""
    found: dict[ObjectRef, list[Workload]] = {}
    for node in nodes.values():
        for ref, replica in node.replicas.items():
            if node.connected and replica.serves and replica.workload:
                try:
                    workload = workload_from_wire(serving_pb2.Workload.FromString(replica.workload))
                except ValueError as error:
                    log.warning("workload of %s cannot be read: %s", ref, error)
                    continue
                found.setdefault(ObjectRef(ref.namespace, ref.service), []).append(workload)
    return {ref: _sum(each) for ref, each in found.items()}


def _sum(workloads: Sequence[Workload]) -> Traffic:
    machine = next((each.machine for each in workloads if each.machine), None)
    return Traffic(Workload(sum((each.sketch for each in workloads), Sketch()), machine), len(workloads))


def visibly_other(held: Traffic, seen: Traffic) -> bool:
    """By more than a part of it, and more than chance makes of so few requests."""
    one, other = held.workload.sketch, seen.workload.sketch
    if held.replicas != seen.replicas or _kind(held) != _kind(seen):
        return True
    chance = _CHANCE / math.sqrt(max(1, min(one.requests, other.requests)))
    # The squared variation of a gamma distribution scatters by some (2 + 6 c) / n, where c is itself.
    bursts = chance * math.sqrt(2 + 6 * one.burstiness)
    return (
        _apart(one.rate_rps, other.rate_rps, chance * max(1.0, math.sqrt(one.burstiness)))
        or _apart(one.burstiness + 1, other.burstiness + 1, max(bursts, 2 * _VISIBLE))
        or abs(one.flex_share - other.flex_share) > max(_VISIBLE, chance)
        or any(_moved(getattr(one, name), getattr(other, name), chance) for name in ("prompts", "outputs", "reused"))
        or _apart(_pace(held), _pace(seen), 0.0)
    )


def _kind(of: Traffic) -> tuple[object, ...]:
    machine = of.workload.machine
    return () if machine is None else (machine.device, machine.units, machine.dtype, machine.layers, machine.kv_tokens)


def _pace(of: Traffic) -> float:
    """A number for how fast its machine is, by what its engine has learned."""
    machine = of.workload.machine
    return 0.0 if machine is None else sum(each.linear_s[-1] for each in machine.times)


def _apart(one: float, other: float, chance: float) -> bool:
    if one <= 0 or other <= 0:
        return one != other
    return abs(math.log(other / one)) > max(_VISIBLE, chance)


def _moved(one: Lengths, other: Lengths, chance: float) -> bool:
    """Whether the shares below any length differ (the distance of Kolmogorov and Smirnov)."""
    if not (one.requests and other.requests):
        return one.requests != other.requests
    below_one = below_other = most = 0.0
    for at in range(max(len(one.counts), len(other.counts))):
        below_one += one.counts[at] / one.requests if at < len(one.counts) else 0.0
        below_other += other.counts[at] / other.requests if at < len(other.counts) else 0.0
        most = max(most, abs(below_one - below_other))
    return most > max(_VISIBLE, chance)


class Forecasts:
    """`ask` simulates; `told` is called when an answer has come."""

    def __init__(self, ask: Callable[[Question], Awaitable[Answer]], told: Callable[[], None]) -> None:
        self._ask = ask
        self._told = told
        self._held: dict[ObjectRef, Traffic] = {}
        self._answers: OrderedDict[Question, Answer] = OrderedDict()
        self._wanted: OrderedDict[Question, None] = OrderedDict()
        self._working: asyncio.Task[None] | None = None

    def see(self, seen: Mapping[ObjectRef, Traffic]) -> None:
        """What comes to every service by now. One of which nothing is heard is forgotten."""
        self._held = {
            ref: each if (held := self._held.get(ref)) is None or visibly_other(held, each) else held
            for ref, each in seen.items()
            if each.workload.sketch.requests >= FEWEST_REQUESTS
        }

    def traffic(self, ref: ObjectRef) -> Traffic | None:
        return self._held.get(ref)

    def answer(self, ref: ObjectRef, objective: Objective) -> Answer | None:
        """None: not known yet. Whoever asks hears of it by `told`, and asks again."""
        traffic = self._held.get(ref)
        if traffic is None:
            return Unanswered("too few requests lately")
        question = traffic.asking(objective)
        found = self._answers.get(question)
        if found is None:
            self._wanted[question] = None
        else:
            self._answers.move_to_end(question)
        return found

    def work(self) -> None:
        """Begins to answer what was asked and is not known, unless that is under way."""
        if self._wanted and (self._working is None or self._working.done()):
            self._working = asyncio.create_task(self._work(), name="forecasts")

    async def stop(self) -> None:
        if self._working is not None:
            self._working.cancel()
            await asyncio.gather(self._working, return_exceptions=True)

    async def _work(self) -> None:
        while self._wanted:
            wanted, self._wanted = self._wanted, OrderedDict()
            for question in wanted:
                if question.workload in {each.workload for each in self._held.values()}:
                    self._answers[question] = await self._ask(question)
            while len(self._answers) > _KEPT:
                self._answers.popitem(last=False)
            self._told()
