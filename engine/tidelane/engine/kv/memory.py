"""Memory of this machine for what is read and written in bulk."""

from __future__ import annotations

import contextlib
import mmap


def zeroed(size: int) -> mmap.mmap:
    """`size` bytes, from a page's start on, which the kernel zeroes when they are touched; on huge pages where it gives
    them. KV is copied in pieces of some kilobytes that lie far apart: on small pages a quarter of the time goes into
    finding them. Private: other processes neither see it nor, forked, write to it."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel may be built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
