"""Writes slots until it is killed. A program, and what its tests have to know of it.

Each line on its standard input, a folder and a number, forks one writer, so that a start costs no imports. It tells on
standard output, by lines, "started PID", then before and after each write "begin SLOT KEY" and "end SLOT KEY"; "ended"
comes when the writer is dead.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
from pathlib import Path
from threading import Thread

from engine.kv.records import key_of, payload_of
from tidelane.engine.kv.slot_file import SlotFile, SlotLayout

LAYOUT = SlotLayout(256 * 1024, 8)
NAMESPACE = b"w" * 32
WRITERS = 2  # at once, each in slots of its own


def open_slots(folder: Path) -> tuple[SlotFile, dict[int, bytes]]:
    return SlotFile.open(
        folder, namespace=NAMESPACE, payload_bytes=LAYOUT.payload_bytes, capacity_bytes=LAYOUT.file_bytes
    )


def tell(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # whole, whatever else is told at the same time


def write_on(slots: SlotFile, first: int, round_number: int) -> None:
    lot = random.Random(round_number * WRITERS + first)
    for count in itertools.count():
        slot = lot.randrange(first, LAYOUT.slots, WRITERS)
        key = key_of((round_number * WRITERS + first) << 32 | count)
        payload = payload_of(key, LAYOUT.payload_bytes)
        tell(f"begin {slot} {key.hex()}")
        slots.write(slot, key, payload)
        tell(f"end {slot} {key.hex()}")


def write_until_killed(folder: Path, round_number: int) -> None:
    tell(f"started {os.getpid()}")
    slots, _ = open_slots(folder)
    for first in range(1, WRITERS):
        Thread(target=write_on, args=(slots, first, round_number)).start()
    write_on(slots, 0, round_number)


def main() -> None:
    for line in sys.stdin:
        folder, round_number = line.rsplit(maxsplit=1)
        pid = os.fork()
        if pid == 0:
            write_until_killed(Path(folder), int(round_number))
        os.waitpid(pid, 0)
        tell("ended")


if __name__ == "__main__":
    main()
