"""Forecasts by the engine's simulator, in a process of its own: the operator itself never imports the engine."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any, Final

from google.protobuf.json_format import MessageToDict

from tidelane.operator.forecasts import Answer, Forecast, Question, Unanswered
from tidelane.rpc.wire import objective_to_wire, workload_to_wire

log = logging.getLogger(__name__)

COMMAND: Final = (sys.executable, "-m", "tidelane.engine.sim.answering")
# Some hundred times what a simulation takes; overloaded ones take longest.
LIMIT_S: Final = 120.0
_LAST_WORDS: Final = 200


class Simulation:
    """One process for each question, ended after `limit_s`."""

    def __init__(self, command: tuple[str, ...] = COMMAND, limit_s: float = LIMIT_S) -> None:
        self._command = command
        self._limit_s = limit_s

    async def ask(self, question: Question) -> Answer:
        """Never fails: what goes wrong is why there is no answer."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            return _failed(f"cannot be started: {error}")
        try:
            async with asyncio.timeout(self._limit_s):
                out, err = await process.communicate(_document(question).encode())
        except TimeoutError:
            return _failed(f"took longer than {self._limit_s:g} s")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            lines = err.decode(errors="replace").strip().splitlines() or ["no word"]
            return _failed(f"ended with {process.returncode}: {lines[-1][-_LAST_WORDS:]}")
        return _answer(out)


def _document(question: Question) -> str:
    return json.dumps(
        {
            "workload": MessageToDict(workload_to_wire(question.workload)),
            "objective": MessageToDict(objective_to_wire(question.objective)),
            "replicas": question.replicas,
        }
    )


def _answer(out: bytes) -> Answer:
    try:
        told: dict[str, Any] = json.loads(out)
        if "why" in told:
            return Unanswered(told["why"])
        return Forecast(int(told["attainment"] * 100 + 1e-9), told["ttft_s"], told["tpot_s"], told["replicas"])
    except (ValueError, KeyError, TypeError) as error:
        return _failed(f"gave no answer: {error}")


def _failed(how: str) -> Unanswered:
    log.warning("simulation %s", how)
    return Unanswered(f"simulation {how}")
