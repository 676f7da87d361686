"""One replica: an actor that watches its engine, asks `lifecycle` what to do, and does it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tidelane.agent import lifecycle
from tidelane.agent.backoff import Failures, RestartPolicy
from tidelane.agent.claims import Slot
from tidelane.agent.command import claimed_cores, engine_arguments, engine_environment, kv_pool_bytes
from tidelane.agent.control import EngineControl, ObjectiveRefused, Unreachable
from tidelane.agent.devices import Device
from tidelane.agent.engine_process import EngineProcess, clear_up
from tidelane.agent.errors import TryLater
from tidelane.agent.feedback import Measured, next_objective
from tidelane.agent.footprint import copies_of_the_model
from tidelane.agent.lifecycle import Limits, Situation, Wanted
from tidelane.agent.ports import choose_port
from tidelane.agent.running import RunningEngine
from tidelane.agent.state import Damaged, Launched, ReplicaFolder
from tidelane.rpc.node_agent_pb2 import ReplicaStatus
from tidelane.rpc.serving_pb2 import EngineStatus
from tidelane.rpc.wire import Objective, ReplicaRef, objective_to_wire, ref_to_wire, spec_to_wire

log = logging.getLogger(__name__)

_TICK_S = 1.0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a replica needs of its node. `clock` is monotonic; `taken_ports` are those of the other replicas."""

    engine_command: tuple[str, ...]
    address: str
    model_store: Path | None
    restart: RestartPolicy
    limits: Limits
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    devices: Callable[[], Mapping[str, Device]]
    taken_ports: Callable[[ReplicaRef], Collection[int]]
    changed: Callable[[], None]


class Replica:
    """`run` drives it until no engine is left and none is wanted; `want` may change the goal at any time."""

    def __init__(self, wanted: Wanted, folder: ReplicaFolder, surroundings: Surroundings) -> None:
        self.wanted = wanted
        self.folder = folder
        self.restarts = 0
        self.port: int | None = None
        self._around = surroundings
        self._engine: RunningEngine | None = None
        self._failures = Failures()
        self._failed_generation: int | None = None
        self._message = ""
        self._objective = next_objective(wanted.spec.objective, None, None)
        self._moved_at_s = surroundings.clock()
        self._wake = asyncio.Event()

    @property
    def ref(self) -> ReplicaRef:
        return self.wanted.spec.ref

    def held_slots(self) -> set[Slot]:
        """What is wanted, and what a running engine still has until it is replaced."""
        held = set(self.wanted.claim.slots)
        if self._engine:
            held.update(self._engine.launched.claim.slots)
        return held

    def want(self, wanted: Wanted) -> None:
        if wanted.spec.generation != self.wanted.spec.generation:
            self._failures = Failures()
            self._message = ""
        self.wanted = wanted
        self._steer(None)
        self._wake.set()

    async def run(self) -> None:
        """Returns on End. When cancelled, the engine is left running for the next agent."""
        try:
            if self._engine is None:
                await self._find_engine()
            while (action := self._next_action()) != lifecycle.End():
                await self._act(action)
        finally:
            if engine := self._engine:
                engine.process.let_go()
                await engine.close()

    def _next_action(self) -> lifecycle.Action:
        return lifecycle.next_action(self._situation(), self._around.clock(), self._around.limits)

    async def _act(self, action: lifecycle.Action) -> None:
        match action, self._engine:
            case lifecycle.Launch(), None:
                self._launch()
            case lifecycle.Drain(), RunningEngine() as engine:
                await self._drain(engine, action)
            case lifecycle.Kill(), RunningEngine() as engine:
                self._kill(engine, action)
            case lifecycle.SendObjective(), RunningEngine() as engine:
                await self._send_objective(engine)
            case lifecycle.Wait(until_s), _:
                await self._wait(until_s)
            case _:
                raise AssertionError(f"{action} does not fit the situation")

    def _situation(self) -> Situation:
        view = self._engine.view(self._objective) if self._engine else None
        return Situation(self.wanted, view, self._failures, self._failed_generation)

    # ---- starting ----------------------------------------------------------------------------------------------------

    async def _find_engine(self) -> None:
        """Takes over the engine that an earlier agent started; ends what cannot be taken over."""
        try:
            launched = self.folder.read_launched()
        except Damaged as error:
            log.error("launch file damaged replica=%s why=%s", self.ref, error)
            launched = None
        if launched:
            self.port = launched.port
            if launched.process and launched.process.alive():
                log.info("found engine running replica=%s pid=%d", self.ref, launched.process.pid)
                self._attend(EngineProcess(launched.process, self.folder.path), launched, in_force=None)
                return
        await clear_up(self.folder.path, grace_s=self._around.limits.front_grace_s if launched else 0.0)

    def _launch(self) -> None:
        around = self._around
        spec, claim, devices = self.wanted.spec, self.wanted.claim, around.devices()
        try:
            self.folder.prepare()
            if not spec.kv_cache.nvme_bytes:
                self.folder.forget_kv()
            self.folder.control_socket.unlink(missing_ok=True)
            self.port = choose_port(self.ref, around.address, spec.port, self.port, around.taken_ports(self.ref))
            launched = Launched(spec, claim, self.port)
            # Written before the start as well: should we die in between, the claim is known and the engine found.
            self.folder.write_launched(launched)
            arguments = engine_arguments(
                spec,
                self._objective,
                around.address,
                self.port,
                self.folder.control_socket,
                around.model_store,
                claimed_cores(claim, devices),
                kv_pool_bytes(claim, devices, copies_of_the_model(spec)),
                self.folder.kv,
            )
            process = EngineProcess.start(
                [*around.engine_command, *arguments],
                self.folder.path,
                engine_environment(claim, devices),
                self.folder.log_file,
            )
        except (OSError, TryLater) as error:
            self._failed(f"could not start: {error}", ready_for_s=0.0)
            return
        launched = replace(launched, process=process.identity)
        self._remember(launched)
        log.info("engine started replica=%s pid=%d port=%d", self.ref, process.identity.pid, self.port)
        self._attend(process, launched, in_force=self._objective)

    def _attend(self, process: EngineProcess, launched: Launched, in_force: Objective | None) -> None:
        control = EngineControl(self.folder.control_socket)
        self._engine = RunningEngine.attend(
            process, launched, in_force, control, _TICK_S, heard=self._heard, ended=self._wake.set
        )
        self._around.changed()

    def _remember(self, launched: Launched) -> None:
        try:
            self.folder.write_launched(launched)
        except OSError as error:
            # The next agent will find the engine by its environment, end it and start another.
            log.error("could not save what was started replica=%s why=%s", self.ref, error)

    # ---- while it runs -----------------------------------------------------------------------------------------------

    def _heard(self, engine: RunningEngine, status: EngineStatus) -> None:
        first = engine.status is None
        engine.status = status
        engine.quiet_s = 0.0
        if first and engine.in_force is None:
            # What the earlier agent had sent is not known for sure: send ours, above whatever is in force.
            revision = max(self._objective.revision, status.objective_revision + 1)
            self._objective = replace(self._objective, revision=revision)
        if engine.ready and engine.ready_at_s is None:
            engine.ready_at_s = self._around.clock()
            if engine.launched.ready_since_unix_s is not None:
                engine.serving_generation = engine.launched.spec.generation
        self._settle(engine)
        self._wake.set()
        self._around.changed()

    def _settle(self, engine: RunningEngine) -> None:
        """Notes the generation and the objective that the engine serves, once all of it is in force."""
        view, wanted = engine.view(self._objective), self.wanted
        if engine.serves(wanted.spec) or not (view.ready and view.objective_in_force):
            return
        if engine.status is None or engine.status.objective_revision < self._objective.revision:
            return
        if lifecycle.must_replace(view, wanted):
            return
        since_s = engine.launched.ready_since_unix_s
        if engine.serving_generation != wanted.spec.generation or since_s is None:
            since_s = self._around.wall_clock()
        engine.serving_generation = wanted.spec.generation
        engine.launched = replace(engine.launched, spec=wanted.spec, ready_since_unix_s=since_s)
        self._message = ""
        self._remember(engine.launched)
        log.info("engine serves replica=%s generation=%d", self.ref, wanted.spec.generation)
        self._around.changed()

    async def _send_objective(self, engine: RunningEngine) -> None:
        objective = self._objective
        try:
            await engine.control.set_objective(objective)
        except ObjectiveRefused as error:
            self._refused(engine, str(error))
        except Unreachable as error:
            log.warning("engine took no objective replica=%s why=%s", self.ref, error)
            await self._wait(None)
        else:
            log.info("objective sent replica=%s revision=%d", self.ref, objective.revision)
            engine.in_force = objective
            self._settle(engine)

    def _refused(self, engine: RunningEngine, why: str) -> None:
        log.warning("engine cannot take the objective while it runs replica=%s why=%s", self.ref, why)
        if engine.launched.spec.objective != self.wanted.spec.objective:
            engine.objective_refused = True
            return
        # Only our own steering is refused: not worth a restart. What is in force stays.
        engine.steerable = False
        echoed = engine.status.objective_revision if engine.status else 0
        self._objective = engine.in_force or replace(self._objective, revision=echoed)
        engine.in_force = self._objective

    def _steer(self, measured: Measured | None) -> None:
        objective = next_objective(self.wanted.spec.objective, measured, self._objective)
        if objective is not self._objective:
            self._objective = objective
            self._moved_at_s = self._around.clock()

    async def _wait(self, until_s: float | None) -> None:
        """Until something happens, `until_s`, or the next tick of the slow loop."""
        began_s = self._around.clock()
        last_heard = self._engine.status if self._engine else None
        limit_s = _TICK_S if until_s is None else min(_TICK_S, max(0.0, until_s - began_s))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._wake.wait()
        self._wake.clear()
        engine = self._engine
        if engine is None:
            return
        if engine.ended.done():
            await self._after_end(engine, engine.ended.result())
            return
        if engine.listener.done():
            engine.listener.result()  # It ends only by breaking, and without it we are deaf.
        if engine.status is last_heard:
            # Bounded: when this process was itself stopped for a minute, its engine was not silent for that minute.
            engine.quiet_s += min(self._around.clock() - began_s, 2 * _TICK_S)
        self.folder.bound_log()
        since_move_s = self._around.clock() - self._moved_at_s
        self._steer(engine.measured(self.wanted.spec.objective.slo, since_move_s))

    # ---- ending ------------------------------------------------------------------------------------------------------

    async def _drain(self, engine: RunningEngine, action: lifecycle.Drain) -> None:
        log.info("draining engine replica=%s why=%s", self.ref, action.reason)
        engine.drain_by_s = action.by_s
        self._around.changed()
        try:
            await engine.control.drain(max(0.0, action.by_s - self._around.clock()))
        except Unreachable:
            # Not listening yet, so it has no requests to finish.
            engine.process.terminate()

    def _kill(self, engine: RunningEngine, action: lifecycle.Kill) -> None:
        log.warning("killing engine replica=%s why=%s", self.ref, action.reason)
        engine.kill_reason = action.reason
        engine.process.kill()
        self._around.changed()

    async def _after_end(self, engine: RunningEngine, code: int | None) -> None:
        self._engine = None
        if engine.drain_by_s is not None:
            log.info("engine ended replica=%s code=%s", self.ref, code)
            self._failures = Failures()
        else:
            now_s = self._around.clock()
            ready_for_s = now_s - engine.ready_at_s if engine.ready_at_s is not None else 0.0
            if code == lifecycle.EXIT_CANNOT_RUN:
                self._failed_generation = engine.launched.spec.generation
            self._failed(engine.kill_reason or _told(code, self.folder.last_words()), ready_for_s)
        self._around.changed()
        await engine.close()
        await clear_up(self.folder.path, self._around.limits.front_grace_s)
        self._remember(replace(engine.launched, process=None, ready_since_unix_s=None))

    def _failed(self, message: str, ready_for_s: float) -> None:
        now_s = self._around.clock()
        self.restarts += 1
        self._failures = self._failures.another(now_s, ready_for_s, self._around.restart)
        self._message = message
        delay_s = self._failures.restart_at_s - now_s
        log.warning("engine failed replica=%s restart_in_s=%.1f why=%s", self.ref, delay_s, message)
        self._around.changed()

    # ---- telling -----------------------------------------------------------------------------------------------------

    def status(self) -> ReplicaStatus:
        now_s = self._around.clock()
        situation = self._situation()
        engine = self._engine
        phase = lifecycle.phase(situation, now_s)
        status = ReplicaStatus(
            id=ref_to_wire(self.ref),
            generation=self.wanted.spec.generation,
            phase=phase,
            message=self._message,
            host=self._around.address,
            port=self.port or 0,
            restarts=self.restarts,
            device_ids=self.wanted.claim.device_ids,
            objective=objective_to_wire(self.wanted.spec.objective),
        )
        if phase == ReplicaStatus.BACKING_OFF:
            status.restart_in_s = max(0.0, self._failures.restart_at_s - now_s)
        if engine:
            status.running.CopyFrom(spec_to_wire(engine.launched.spec))
        if engine and engine.status:
            status.engine.CopyFrom(engine.status)
            status.model_loaded = engine.status.state in (EngineStatus.WARMING, EngineStatus.READY)
            status.message = self._message or engine.status.message
            status.serving_generation = engine.serving_generation
            status.serves_objective = engine.serves(self.wanted.spec)
            if engine.ready and engine.serving_generation:
                status.ready_since_unix_s = engine.launched.ready_since_unix_s or 0.0
        return status


def _told(code: int | None, last_words: str) -> str:
    if code is None:
        how = "ended"
    elif code < 0:
        how = f"was ended by signal {-code}"
    else:
        how = f"exited with code {code}"
    return f"engine {how}: {last_words}" if last_words else f"engine {how}"
