"""`tidelane` with a disk for KV whose reads fail as long as the file named first is there, or hang if it says so."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from typing_extensions import Buffer, override

from tidelane.cli.main import main
from tidelane.engine.kv import slot_file
from tidelane.engine.kv.faulty_pages import FaultRates, FaultyPages
from tidelane.engine.kv.page_file import PageFile

failing = Path(sys.argv.pop(1))


class BadSectors(FaultyPages):
    @staticmethod
    def open(path: Path, size: int) -> BadSectors:
        return BadSectors(PageFile.open(path, size), FaultRates(), seed=1)

    @override
    def read(self, into: Sequence[Buffer], offset: int) -> int:
        if failing.exists() and failing.read_text() == "hang":
            threading.Event().wait()
        self.rates = FaultRates(io_error=1.0 if failing.exists() else 0.0)
        return super().read(into, offset)

    @override
    def write(self, data: Sequence[Buffer], offset: int) -> int:
        self.rates = FaultRates()
        return super().write(data, offset)


slot_file.PageFile = BadSectors  # type: ignore[assignment, attr-defined]
sys.exit(main())
