"""`python -m tidelane.engine.sim.answering`: one question of the operator on standard input, its answer on standard
output, both JSON.

A process of its own, which the operator may end at any time: a simulation takes seconds, and must not hold up anything.
The question: `workload` and `objective`, as on the wire, and `replicas`. The answer: the fields of a Forecast, or `why`
there is none.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any, Final

from google.protobuf import json_format

from tidelane.engine.sim.forecast import CannotSimulate, Forecast, forecast
from tidelane.engine.sim.reported import reported
from tidelane.engine.sim.synthetic import TooLittleSeen
from tidelane.rpc import serving_pb2
from tidelane.rpc.wire import objective_from_wire, workload_from_wire

# Behind whatever else the machine does: nobody waits for it.
_NICENESS: Final = 10


def answer(question: str) -> dict[str, Any]:
    """Raises ValueError for what is no question."""
    asked = json.loads(question)
    try:
        return asdict(_forecast(asked))
    except (CannotSimulate, TooLittleSeen) as error:
        return {"why": str(error)}


def _forecast(asked: dict[str, Any]) -> Forecast:
    workload = workload_from_wire(json_format.ParseDict(asked["workload"], serving_pb2.Workload()))
    objective = objective_from_wire(json_format.ParseDict(asked["objective"], serving_pb2.Objective()))
    if workload.machine is None:
        raise CannotSimulate("its engines do not say what they run on")
    return forecast(reported(workload.machine), workload.sketch, objective, asked["replicas"])


def main() -> int:
    os.nice(_NICENESS)
    json.dump(answer(sys.stdin.read()), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
