"""Runs a prefill side."""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import sys
from multiprocessing.connection import Connection

import msgspec

from tidelane.engine.handover.config import PrefillConfig

_PR_SET_PDEATHSIG = 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="tidelane.engine.handover", description="The prefill side of an engine.")
    parser.add_argument("--config", required=True, help="a PrefillConfig, as JSON")
    parser.add_argument("--link-fd", type=int, required=True, help="socket to the decode side")
    parser.add_argument("--decode-pid", type=int, required=True, help="its parent")
    options = parser.parse_args()
    _die_with(options.decode_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the decode side, which may drain first
    config = msgspec.json.decode(options.config, type=PrefillConfig)
    logging.basicConfig(
        level=config.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    # torch takes seconds to import: the decode side may end before that.
    from tidelane.engine.handover.prefill_process import prefill

    return prefill(config, Connection(options.link_fd))


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, whatever it is doing then."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that
        raise SystemExit(0)


sys.exit(main())
