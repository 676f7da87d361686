"""What the operator is put through, phase by phase, and the figures of each."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cluster.harness import WRITES, Cluster, Request
from scale.fleet import Fleet, fleet, twice
from scale.operator_process import OperatorProcess, Usage, by_verb, of_the_operator, running
from scale.services import NAMESPACE, Seen, Services, services

_CRDS: Final = Path(__file__).resolve().parents[2] / "crds"
_DEVICES: Final = 4
_LOOK_EVERY_S: Final = 0.1


@dataclass(frozen=True)
class Size:
    """How much of everything. `limit_s` is how long any one phase may take before it counts as failed."""

    agents: int = 500
    services: int = 1000
    processes: int = 10
    load_s: float = 1.0
    quiet_s: float = 120.0
    move_after_s: float = 20.0
    limit_s: float = 300.0


@dataclass(frozen=True)
class Phase:
    """`figures` by name with its unit; `requests` of the operator to the API server, and `cpu_s` of the operator."""

    name: str
    wall_s: float
    cpu_s: float
    load_average: float
    requests: Mapping[str, int]
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def total_requests(self) -> int:
        return sum(self.requests.values())


@dataclass(frozen=True)
class Outcome:
    size: Size
    phases: Sequence[Phase]
    peak_mib: float

    def phase(self, name: str) -> Phase:
        [found] = [each for each in self.phases if each.name == name]
        return found


class Scenario:
    """Everything that runs; `phases` grows as it goes on."""

    def __init__(self, size: Size, cluster: Cluster, agents: Fleet, users: Services, folder: Path) -> None:
        self.size = size
        self.cluster = cluster
        self.agents = agents
        self.users = users
        self.names = [f"chat-{index:04d}" for index in range(size.services)]
        self.phases: list[Phase] = []
        self.peak_mib = 0.0
        self._log = folder / "operator.log"
        self._options = ("--log-level", "warning", "--unreachable-after", "5", "--move-after", str(size.move_after_s))

    async def run(self) -> None:
        with self._operator() as operator:
            await self.place(operator)
            await self.quiet(operator)
            await self.change_all(operator)
            self._note(operator.usage())
        with self._operator() as operator:
            await self.take_over(operator)
            await self.lose_a_tenth(operator)
            await self.let_them_back(operator)
            self._note(operator.usage())

    async def place(self, operator: OperatorProcess) -> None:
        measuring = self._measure("place", operator)
        await self.users.make(self.names)
        made_s = measuring.elapsed_s
        await self.users.until(lambda seen: bool(seen.owners), self.names, self.size.limit_s)
        placed_s = measuring.elapsed_s
        await self.users.until(lambda seen: seen.ready, self.names, self.size.limit_s)
        waits_s = sorted(self.users.placed_s[name] - self.users.made_s[name] for name in self.names)
        await self._settled(operator)
        measuring.end(
            made_s=made_s,
            all_placed_s=placed_s,
            placed_p50_s=statistics.median(waits_s),
            placed_p99_s=waits_s[min(len(waits_s) - 1, int(len(waits_s) * 0.99))],
        )

    async def quiet(self, operator: OperatorProcess) -> None:
        measuring = self._measure("quiet", operator)
        await asyncio.sleep(self.size.quiet_s)
        measuring.end(writes=float(len(measuring.writes())))

    async def change_all(self, operator: OperatorProcess) -> None:
        before, launches = self.users.owners, self._launches()
        measuring = self._measure("change all", operator)
        await self.users.retarget(self.names, "40ms")
        await self.users.until(_serving(2), self.names, self.size.limit_s)
        all_serve_s = measuring.elapsed_s
        await self._settled(operator)
        measuring.end(all_serve_s=all_serve_s, moved=self._moved(before), launches=self._launches() - launches)

    async def take_over(self, operator: OperatorProcess) -> None:
        """After a restart: steady once the next change is acted upon."""
        before, launches = self.users.owners, self._launches()
        measuring = self._measure("restart", operator, since_start=True)
        await self.users.retarget(self.names[:1], "30ms")
        await self.users.until(_serving(3), self.names[:1], self.size.limit_s)
        steady_s = measuring.elapsed_s
        await self._settled(operator)
        measuring.end(steady_s=steady_s, moved=self._moved(before), launches=self._launches() - launches)

    async def lose_a_tenth(self, operator: OperatorProcess) -> None:
        gone = set(self.agents.processes[0].agents)
        hit = [name for name, owners in self.users.owners.items() if gone & set(owners.values())]
        measuring = self._measure("agents vanish", operator)
        self.agents.processes[0].vanish()

        def elsewhere(seen: Seen) -> bool:
            return bool(seen.owners) and not gone & set(seen.owners.values()) and seen.ready

        await self.users.until(elsewhere, hit, self.size.limit_s)
        elsewhere_s = measuring.elapsed_s
        await self._settled(operator)
        report = self.agents.report(without_first=True)
        measuring.end(services_hit=len(hit), elsewhere_s=elsewhere_s, twice=len(twice(report)))

    async def let_them_back(self, operator: OperatorProcess) -> None:
        """The replicas that they still run are not theirs any more."""
        owners = self.users.owners
        measuring = self._measure("agents return", operator)
        self.agents.processes[0].come_back()

        def right() -> bool:
            report = self.agents.report()
            wanted = {
                (node, f"{NAMESPACE}/{name}/{index}") for name, each in owners.items() for index, node in each.items()
            }
            return {(has.node, has.replica) for has in report} == wanted and not twice(report)

        deadline_s = time.monotonic() + self.size.limit_s
        while not right():
            assert time.monotonic() < deadline_s, f"still twice: {twice(self.agents.report())[:3]}"
            await asyncio.sleep(_LOOK_EVERY_S)
        right_s = measuring.elapsed_s
        await self._settled(operator)
        measuring.end(right_s=right_s, moved=self._moved(owners))

    def _operator(self) -> AbstractContextManager[OperatorProcess]:
        return running(self.cluster, self.agents.targets, self._options, self._log)

    def _measure(self, name: str, operator: OperatorProcess, *, since_start: bool = False) -> _Measuring:
        return _Measuring(self, name, operator, since_start=since_start)

    async def _settled(self, operator: OperatorProcess) -> None:
        """Until the operator has asked the API server for nothing for a while: what follows is not this phase's."""
        deadline_s = time.monotonic() + self.size.limit_s
        before = -1
        while (now := len(of_the_operator(self.cluster.requests()))) != before:
            assert time.monotonic() < deadline_s, "the operator never comes to rest"
            before = now
            await asyncio.sleep(2.0)

    def _launches(self) -> int:
        return sum(has.launches for has in self.agents.report())

    def _moved(self, before: Mapping[str, Mapping[int, str]]) -> int:
        """Services whose replicas have other owners than before."""
        return sum(owners != before.get(name) for name, owners in self.users.owners.items())

    def _note(self, usage: Usage) -> None:
        self.peak_mib = max(self.peak_mib, usage.peak_mib)


class _Measuring:
    """One phase under way."""

    def __init__(self, scenario: Scenario, name: str, operator: OperatorProcess, *, since_start: bool) -> None:
        self._scenario = scenario
        self._name = name
        self._operator = operator
        self._began_s = time.monotonic()
        self._cpu_s = 0.0 if since_start else operator.usage().cpu_s
        self._requests = len(scenario.cluster.requests())

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def requests(self) -> Sequence[Request]:
        """Of the operator, since the phase began."""
        return of_the_operator(self._scenario.cluster.requests()[self._requests :])

    def writes(self) -> Sequence[Request]:
        return [each for each in self.requests() if each.verb in WRITES and each.resource != "leases"]

    def end(self, **figures: float) -> None:
        cpu_s = self._operator.usage().cpu_s - self._cpu_s
        phase = Phase(self._name, self.elapsed_s, cpu_s, os.getloadavg()[0], by_verb(self.requests()), figures)
        self._scenario.phases.append(phase)
        print(f"{phase.name}: {phase.wall_s:.1f} s, {phase.cpu_s:.1f} s of CPU", flush=True)


def _serving(generation: int) -> Callable[[Seen], bool]:
    return lambda seen: seen.ready and seen.generation >= generation


async def run(size: Size, cluster: Cluster, folder: Path) -> Outcome:
    """The cluster must be fresh, and audit reads."""
    cluster.kubectl("apply", "-f", str(_CRDS))
    cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
    cluster.kubectl("create", "namespace", NAMESPACE)
    async with AsyncExitStack() as stack:
        agents = stack.enter_context(fleet(size.agents, size.processes, _DEVICES, size.load_s, folder))
        users = await stack.enter_async_context(services(cluster.kubeconfig))
        scenario = Scenario(size, cluster, agents, users, folder)
        await scenario.run()
    return Outcome(size, scenario.phases, scenario.peak_mib)
