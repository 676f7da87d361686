"""A CPU that stands in for a GPU in a dry run: streams that do nothing, events that have always ended."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tidelane.engine.lanes.partition import PartitionTable


class HostStream:
    def wait_event(self, event: Any) -> None:
        return


class HostEvent:
    def __init__(self) -> None:
        self.recorded_s = 0.0

    def record(self, stream: Any) -> None:
        self.recorded_s = time.monotonic()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: HostEvent) -> float:
        return (end.recorded_s - self.recorded_s) * 1000


class HostGpu:
    def enter_thread(self) -> None:
        return

    def on(self, stream: Any) -> AbstractContextManager[object]:
        return nullcontext()

    def event(self) -> HostEvent:
        return HostEvent()


class HostLanes:
    def __init__(self, table: PartitionTable) -> None:
        self.table = table

    def decode(self, units: int) -> HostStream:
        return HostStream()

    def prefill(self, units: int) -> HostStream:
        return HostStream()

    def close(self) -> None:
        return
