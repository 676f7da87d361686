"""Memory that two processes share, by a descriptor.

It has no name: when the last process that has the descriptor or a mapping is gone, however it ended, so is the memory.
"""

from __future__ import annotations

import mmap
import os

import torch


class SharedMemory:
    """`size` bytes, zeroed, which the kernel provides on first touch. A child gets `fd` by `pass_fds`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.fd = os.memfd_create("tidelane-kv", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size)

    def mapped(self) -> torch.Tensor:
        """[size, uint8]; the mapping lasts as long as the tensor."""
        return mapped(self.fd, self.size)

    def close(self) -> None:
        """Mappings stay."""
        os.close(self.fd)


def mapped(fd: int, size: int) -> torch.Tensor:
    """[size, uint8] of what another process has made."""
    return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
