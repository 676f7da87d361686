"""A living engine as its replica sees it: the process, its control connection, and what it last said."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tidelane.agent.control import EngineControl
from tidelane.agent.engine_process import EngineProcess
from tidelane.agent.feedback import Measured, ttft_ratio
from tidelane.agent.lifecycle import EngineView
from tidelane.agent.state import Launched
from tidelane.engine.slo import Slo
from tidelane.rpc.serving_pb2 import EngineStatus
from tidelane.rpc.wire import Objective, ReplicaSpec


@dataclass(slots=True)
class RunningEngine:
    """`in_force` is the objective that it last took; None: it was found running, and nothing was sent to it yet.

    `quiet_s` is how long it has said nothing, `drain_by_s` until when it may finish, `ready_at_s` when it was first
    seen ready by this agent (monotonic), `serving_generation` 0 until all of a generation is in force.
    """

    process: EngineProcess
    launched: Launched
    in_force: Objective | None
    control: EngineControl
    ended: asyncio.Task[int | None]
    listener: asyncio.Task[None]
    status: EngineStatus | None = None
    quiet_s: float = 0.0
    objective_refused: bool = False
    steerable: bool = True
    drain_by_s: float | None = None
    kill_reason: str | None = None
    serving_generation: int = 0
    ready_at_s: float | None = None

    @classmethod
    def attend(
        cls,
        process: EngineProcess,
        launched: Launched,
        in_force: Objective | None,
        control: EngineControl,
        period_s: float,
        heard: Callable[[RunningEngine, EngineStatus], None],
        ended: Callable[[], None],
    ) -> RunningEngine:
        """Begins to listen to it and to wait for its end; both callbacks come from the event loop."""

        async def listen() -> None:
            async for status in control.statuses(period_s):
                heard(engine, status)

        waiting = asyncio.create_task(process.ended())
        waiting.add_done_callback(lambda _: ended())
        engine = cls(process, launched, in_force, control, waiting, asyncio.create_task(listen()))
        return engine

    @property
    def ready(self) -> bool:
        return self.status is not None and self.status.state == EngineStatus.READY

    def serves(self, spec: ReplicaSpec) -> bool:
        """Whether all of that is in force; `launched` follows what the engine has taken."""
        running = self.launched.spec
        return self.serving_generation == spec.generation and running.objective == spec.objective

    def view(self, objective: Objective) -> EngineView:
        return EngineView(
            spec=self.launched.spec,
            claim=self.launched.claim,
            heard=self.status is not None,
            ready=self.ready,
            quiet_s=self.quiet_s,
            objective_in_force=self.in_force == objective,
            objective_refused=self.objective_refused,
            drain_by_s=self.drain_by_s,
            killed=self.kill_reason is not None,
        )

    def measured(self, slo: Slo, since_move_s: float) -> Measured | None:
        """None while there is nothing to steer by."""
        if self.status is None or not self.ready or not self.steerable or self.drain_by_s is not None:
            return None
        latency = self.status.latency
        if not latency.window_s > 0:
            return None
        return Measured(
            requests=latency.requests,
            tpot_ratio=latency.tpot_at_percentile_s / slo.tpot_s,
            ttft_ratio=ttft_ratio(latency.ttft_target_ratio_at_percentile, latency.ttft_at_percentile_s, slo),
            window_s=latency.window_s,
            since_move_s=since_move_s,
        )

    async def close(self) -> None:
        """Stops listening; the process is not touched."""
        tasks: tuple[asyncio.Task[Any], ...] = (self.listener, self.ended)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await self.control.close()
