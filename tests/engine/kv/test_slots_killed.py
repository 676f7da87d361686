"""The process that writes is killed at any moment: what it had written is there, what it was writing is a miss."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.kv.records import payload_of
from engine.kv.slot_writer import LAYOUT, WRITERS, open_slots
from engine.kv.slots_contract import read
from tidelane.engine.kv.page_file import FolderInUse

TESTS = Path(__file__).parents[2]


class Writer:
    """The program of slot_writer.py, and what its slots must hold by what it has told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.held: dict[int, bytes] = {}  # by writes that returned
        self.begun: dict[int, bytes] = {}  # by those that had not
        environment = {**os.environ, "PYTHONPATH": str(TESTS)}
        command = [sys.executable, "-m", "engine.kv.slot_writer"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            bufsize=1,
            start_new_session=True,
        )

    def start(self, round_number: int) -> int:
        assert self._process.stdin is not None
        self.begun.clear()
        self._process.stdin.write(f"{self.folder} {round_number}\n")
        word, pid = self._line().split()
        assert word == "started"
        return int(pid)

    def hear(self) -> bool:
        """Takes note of one more line; False once the writer is dead."""
        word, *rest = self._line().split()
        if word == "ended":
            return False
        slot, key = int(rest[0]), bytes.fromhex(rest[1])
        if word == "begin":
            self.begun[slot] = key
        else:
            self.held[slot] = self.begun.pop(slot)
            assert self.held[slot] == key
        return True

    def stop(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)  # with a writer, if a test failed before it was killed
        with self._process:
            pass

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    writer = Writer(tmp_path)
    yield writer
    writer.stop()


def kill_at_many_moments(writer: Writer, moments: int, most_lines: int) -> None:
    lot = random.Random(4)
    returned = survived = 0
    for round_number in range(moments):
        pid = writer.start(round_number)
        for line in range(lot.randrange(most_lines)):
            assert writer.hear()
            if line == 0:
                with pytest.raises(FolderInUse):
                    open_slots(writer.folder)
        os.kill(pid, signal.SIGKILL)
        while writer.hear():
            pass
        assert len(writer.begun) <= WRITERS

        slots, found = open_slots(writer.folder)
        for slot in range(LAYOUT.slots):
            held, begun, key = writer.held.get(slot), writer.begun.get(slot), found.get(slot)
            content = None if key is None else read(slots, slot, key)
            assert content is None or (key is not None and content == payload_of(key, LAYOUT.payload_bytes))
            if begun is None:
                returned += held is not None
                survived += held is not None and key == held and content is not None
                assert key == held, "not written to when it was killed"
            else:
                assert key in (None, held, begun)
                writer.held.pop(slot, None)
                if key is not None and content is not None:
                    writer.held[slot] = key
                else:
                    slots.erase(slot)
        slots.close()
    assert returned > moments
    assert survived == returned


def test_killed_at_twenty_moments(writer: Writer) -> None:
    kill_at_many_moments(writer, 20, most_lines=10)


@pytest.mark.slow
def test_killed_at_a_hundred_moments(writer: Writer) -> None:
    kill_at_many_moments(writer, 100, most_lines=60)
