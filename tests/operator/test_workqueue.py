"""The queue of names: coalescing, one worker a name, back-off; on a clock that jumps to whatever is due."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from typing_extensions import override

from tidelane.operator.errors import Conflict, Retry
from tidelane.operator.resources import ObjectRef
from tidelane.operator.workqueue import WorkQueue

A, B = ObjectRef("default", "a"), ObjectRef("default", "b")


class JumpingLoop(asyncio.SelectorEventLoop):
    """Sleeping takes no time: the clock jumps to the next timer when nothing else is left to run."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0

    @override
    def time(self) -> float:
        return self._now_s

    @override
    def _run_once(self) -> None:  # type: ignore[misc]
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self._now_s = max(self._now_s, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def jumping(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(test())


async def worked(work: Callable[[ObjectRef], Any], *adds: tuple[ObjectRef, float], until_s: float = 1000.0) -> None:
    queue = WorkQueue(work, workers=2)
    running = asyncio.create_task(queue.run())
    for ref, after_s in adds:
        queue.add(ref, after_s)
    await asyncio.sleep(until_s)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def now_s() -> float:
    return asyncio.get_running_loop().time()


def test_the_same_name_coalesces_and_the_earliest_time_counts() -> None:
    seen: list[float] = []

    async def work(ref: ObjectRef) -> None:
        seen.append(now_s())

    jumping(lambda: worked(work, (A, 30.0), (A, 10.0), (A, 20.0)))
    assert seen == [10.0]


def test_asked_again_meanwhile_means_once_more_and_never_twice_at_once() -> None:
    active, most, runs = 0, 0, 0

    async def test() -> None:
        async def work(ref: ObjectRef) -> None:
            nonlocal active, most, runs
            active += 1
            most, runs = max(most, active), runs + 1
            if runs < 3:
                queue.add(ref)
            await asyncio.sleep(5)
            active -= 1

        queue = WorkQueue(work, workers=2)
        running = asyncio.create_task(queue.run())
        queue.add(A)
        await asyncio.sleep(100)
        running.cancel()

    jumping(test)
    assert (runs, most) == (3, 1)


def test_names_run_side_by_side_up_to_the_number_of_workers() -> None:
    starts: dict[str, float] = {}

    async def work(ref: ObjectRef) -> None:
        starts[ref.name] = now_s()
        await asyncio.sleep(10)

    jumping(lambda: worked(work, (A, 0), (B, 0), (ObjectRef("default", "c"), 0)))
    assert starts == {"a": 0.0, "b": 0.0, "c": 10.0}


def test_comes_again_when_told_to() -> None:
    seen: list[float] = []

    async def work(ref: ObjectRef) -> float | None:
        seen.append(now_s())
        return 60.0 if len(seen) < 3 else None

    jumping(lambda: worked(work, (A, 0)))
    assert seen == [0.0, 60.0, 120.0]


@pytest.mark.parametrize("error", [Retry("not now"), RuntimeError("a bug")])
def test_failures_are_spaced_out_and_stop_nobody_else(error: Exception) -> None:
    seen: dict[str, list[float]] = {"a": [], "b": []}

    async def work(ref: ObjectRef) -> None:
        seen[ref.name].append(now_s())
        if ref == A:
            raise error

    jumping(lambda: worked(work, (A, 0), (B, 1), until_s=400))
    gaps = [after - before for before, after in itertools.pairwise(seen["a"])]
    assert gaps[:4] == pytest.approx([0.2, 0.4, 0.8, 1.6])
    assert max(gaps) == pytest.approx(60.0)
    assert seen["b"] == [1.0]


def test_success_forgets_failures() -> None:
    seen: list[float] = []

    async def work(ref: ObjectRef) -> float | None:
        seen.append(now_s())
        if len(seen) in (1, 2, 4):
            raise Retry("not now")
        return 100.0 if len(seen) < 5 else None

    jumping(lambda: worked(work, (A, 0)))
    gaps = [after - before for before, after in itertools.pairwise(seen)]
    assert gaps == pytest.approx([0.2, 0.4, 100.0, 0.2])


def test_a_retry_at_once_is_spaced_out_when_it_goes_on() -> None:
    seen: list[float] = []

    async def work(ref: ObjectRef) -> None:
        seen.append(now_s())
        raise Retry("a conflict", after_s=0.0)

    jumping(lambda: worked(work, (A, 0), until_s=10))
    assert seen[:4] == [0.0, 0.0, 0.0, 0.0]
    assert len(seen) < 10


def test_how_late_and_how_long_each_look_was_is_told() -> None:
    told: list[tuple[float, float, str]] = []

    class Meter:
        def looked(self, late_s: float, took_s: float, error: BaseException | None) -> None:
            told.append((late_s, took_s, type(error).__name__))

    async def test() -> None:
        async def work(ref: ObjectRef) -> None:
            await asyncio.sleep(10)
            if ref == A:
                raise Conflict("not now")
            if ref == B:
                raise ZeroDivisionError

        queue = WorkQueue(work, workers=1, meter=Meter())
        for ref in (A, B, ObjectRef("default", "c")):
            queue.add(ref)
        running = asyncio.create_task(queue.run())
        await asyncio.sleep(5)
        assert queue.waiting == 2
        await asyncio.sleep(30)
        running.cancel()

    jumping(test)
    assert told[:3] == [(0.0, 10.0, "Conflict"), (10.0, 10.0, "ZeroDivisionError"), (20.0, 10.0, "NoneType")]
