"""A GPU that keeps a diary: streams and events that only write down what is asked of them. Compute is the CPU's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import count

from typing_extensions import override

from tidelane.engine.lanes.partition import PartitionTable


@dataclass
class FakeStream:
    name: str
    diary: list[str]

    def wait_event(self, event: FakeEvent) -> None:
        self.diary.append(f"{self.name} waits for {event}")


@dataclass
class FakeEvent:
    """Ends once it was looked at `looks` times."""

    gpu: FakeGpu
    number: int
    looks: int
    stream: FakeStream | None = None

    @override
    def __str__(self) -> str:
        return f"e{self.number} of {self.stream.name if self.stream else 'nobody'}"

    def record(self, stream: FakeStream) -> None:
        self.stream = stream
        if self.gpu.lost:
            raise RuntimeError("CUDA error: the GPU is on fire")

    def query(self) -> bool:
        self.looks -= 1
        return self.looks < 0 and self.gpu.may_end(self)

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.stream is end.stream
        return self.gpu.launch_ms


@dataclass
class FakeGpu:
    diary: list[str] = field(default_factory=list)
    launch_ms: float = 2.0
    lost: bool = False
    may_end: Callable[[FakeEvent], bool] = lambda _: True
    on_enter: Callable[[FakeStream], None] = lambda _: None
    _numbers: Iterator[int] = field(default_factory=count)
    _here: threading.local = field(default_factory=threading.local)

    def enter_thread(self) -> None:
        self.diary.append(f"{threading.current_thread().name} enters")

    def on(self, stream: FakeStream) -> AbstractContextManager[object]:
        @contextmanager
        def within() -> Iterator[None]:
            self.on_enter(stream)
            yield

        return within()

    def event(self) -> FakeEvent:
        return FakeEvent(self, next(self._numbers), looks=2)


class FakeLanes:
    def __init__(self, table: PartitionTable, gpu: FakeGpu) -> None:
        self.table = table
        self.whole = FakeStream("whole", gpu.diary)
        self._decode = {row.decode_units: FakeStream(f"decode-{row.decode_units}", gpu.diary) for row in table.splits}
        self._prefill = {
            row.prefill_units: FakeStream(f"prefill-{row.prefill_units}", gpu.diary) for row in table.splits
        }

    def decode(self, units: int) -> FakeStream:
        return self.whole if units == self.table.units else self._decode[units]

    def prefill(self, units: int) -> FakeStream:
        return self.whole if units == self.table.units else self._prefill[units]

    def close(self) -> None:
        return
