"""Keys, payloads, and memory to hold them."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from tidelane.engine.kv.page_file import PAGE


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


def payload_of(key: bytes, size: int) -> bytes:
    """Random, but the same for each key."""
    return np.random.default_rng(list(key)).bytes(size)


def on_a_page(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size))


def off_a_page(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size + PAGE))[8 : 8 + size]


def noise(size: int) -> bytes:
    return np.random.default_rng().bytes(size)


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(at)
        file.write(data)


def flip(path: Path, at: int) -> None:
    """One byte of the file becomes another; done twice, it is what it was."""
    with path.open("r+b", buffering=0) as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 0x55]))
