"""What the loop's desk does with messages that concern no request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tidelane.engine.channel import Endpoint, FrontFailed, ToFront, ToLoop, front_end, loop_end
from tidelane.engine.control import ControlRoom
from tidelane.engine.desk import ChannelDesk
from tidelane.engine.errors import CannotServe
from tidelane.engine.kv.traffic import Traffic
from tidelane.engine.lanes.partition import partition_table
from tidelane.engine.slo import Slo
from tidelane.engine.wakeup import Wakeup
from tidelane.engine.window import LatencyWindow
from tidelane.engine.workload_report import WorkloadReport
from tidelane.engine.workload_window import WorkloadWindow
from tidelane.rpc import serving_pb2
from tidelane.rpc.wire import ExecutionMode, LateRequests, Objective

from .virtual import World


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Endpoint[ToLoop, ToFront]]:
    with closing(front_end(str(tmp_path / "channel"))) as endpoint:
        yield endpoint


def desk_of(world: World, endpoint: Endpoint[ToFront, ToLoop], wakeup: Wakeup, room: ControlRoom) -> ChannelDesk:
    clock, status = world.clock, serving_pb2.EngineStatus()
    window, workload = LatencyWindow(clock), WorkloadReport(WorkloadWindow(clock), None, partition_table(4), 16, 1600)
    return ChannelDesk(endpoint, wakeup, room, world.ledger, world.usage, Traffic(clock), window, status, workload)


def test_why_the_front_gave_up_is_why_the_engine_cannot_serve(front: Endpoint[ToLoop, ToFront], tmp_path: Path) -> None:
    world, wakeup = World(), Wakeup()
    room = ControlRoom(Objective(Slo(ttft_s=2, tpot_s=0.2), ExecutionMode.LANES), wakeup.notify)
    with closing(wakeup), closing(loop_end(str(tmp_path / "channel"))) as endpoint:
        desk = desk_of(world, endpoint, wakeup, room)
        front.send(FrontFailed("cannot load the model's tokenizer: no such file"))
        assert endpoint.incoming.poll(5000)
        with pytest.raises(CannotServe, match=r"^the HTTP front cannot load the model's tokenizer: no such file$"):
            desk.messages()


def test_what_becomes_of_late_requests_changes_without_a_restart(tmp_path: Path) -> None:
    world, wakeup = World(), Wakeup()
    serving = Objective(Slo(ttft_s=2, tpot_s=0.2), ExecutionMode.LANES)
    room = ControlRoom(serving, wakeup.notify)
    with closing(wakeup), closing(loop_end(str(tmp_path / "channel"))) as endpoint:
        desk = desk_of(world, endpoint, wakeup, room)
        desk.wait()
        assert not world.ledger.objective.refuse_late
        room.set_objective(replace(serving, late_requests=LateRequests.REFUSE))
        desk.wait()
        assert world.ledger.objective.refuse_late
