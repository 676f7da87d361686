"""Ctrl-C in an event loop."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tidelane.cli.interrupts import run_interruptible

NUMBERS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def _hears_both() -> Iterator[None]:
    before = {number: signal.signal(number, signal.default_int_handler) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_it_never_lands_in_the_middle_of_a_callback(number: signal.Signals) -> None:
    broken: list[dict[str, Any]] = []
    cleaned = []

    async def work() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: broken.append(context))
        arrived = loop.create_future()

        def arrive() -> None:
            assert not arrived.done()
            os.kill(os.getpid(), number)
            arrived.set_result(None)  # as asyncio's own callbacks do, having looked before

        loop.call_soon(arrive)
        try:
            await arrived
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    with pytest.raises(KeyboardInterrupt):
        run_interruptible(work())
    assert broken == []
    assert cleaned == [True]
    assert {signal.getsignal(each) for each in NUMBERS} == {signal.default_int_handler}


def test_a_second_one_does_not_wait() -> None:
    async def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        run_interruptible(work())


def test_what_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    async def work() -> int:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0)
        return 7

    assert run_interruptible(work()) == 7
