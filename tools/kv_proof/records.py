"""Looking at a file of KV records from outside, by what docs/kv-on-disk.md says of it and nothing else."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64_intdigest

_HEADER_BYTES = 4096
_NAME_BYTES = 16
_FIELDS = struct.Struct("<8sIIQ32s32sQ")
_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Records:
    """`whole` are the names of blocks, 16 bytes each; `torn` are slots whose header is whole and whose payload is not
    what it says."""

    whole: frozenset[bytes]
    torn: frozenset[int]


def verify(file: Path, payload_bytes: int) -> Records:
    """Of all slots for payloads of that size. Slots with no header are free."""
    record_bytes = _HEADER_BYTES + -(-payload_bytes // 4096) * 4096
    whole, torn = set(), set()
    with file.open("rb") as records:
        for slot in range(file.stat().st_size // record_bytes):
            record = memoryview(records.read(record_bytes))
            magic, schema, _, size, _, key, checksum = _FIELDS.unpack_from(record)
            (own,) = _CHECKSUM.unpack_from(record, _FIELDS.size)
            header = (magic, schema, size, own) == (b"TDLN-KV\0", 1, payload_bytes, _own(record))
            if not header or any(record[_FIELDS.size + _CHECKSUM.size : _HEADER_BYTES]):
                continue
            if xxh3_64_intdigest(record[_HEADER_BYTES : _HEADER_BYTES + payload_bytes]) == checksum:
                whole.add(key[:_NAME_BYTES])
            else:
                torn.add(slot)
    return Records(frozenset(whole), frozenset(torn))


def _own(record: memoryview) -> int:
    return xxh3_64_intdigest(record[: _FIELDS.size])
