"""The fake engine, listening on loopback whatever address its agent publishes: no test opens a port to the network."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if "--host" in sys.argv:
    sys.argv[sys.argv.index("--host") + 1] = "127.0.0.1"
fake = str(Path(__file__).parents[1] / "agent" / "fake_engine.py")
sys.argv[0] = fake
runpy.run_path(fake, run_name="__main__")
