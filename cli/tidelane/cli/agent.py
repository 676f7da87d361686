"""`tidelane agent`: the node agent as a process."""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import logging
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tidelane.cli.numbers import count_from_1, seconds

if TYPE_CHECKING:  # The agent's part is loaded only when it runs, not to show another command's help.
    from tidelane.agent.server import AgentSettings, TlsPaths

_DESCRIPTION = """Runs engines on this node as an operator asks over gRPC, and holds them to their objectives. Engines
go on when the agent ends, and are found again by the next one that has the same state folder."""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("agent", help="run the node agent", description=_DESCRIPTION)
    add = parser.add_argument
    add("--listen", default="127.0.0.1:50061", metavar="HOST:PORT", help="where the gRPC service listens (%(default)s)")
    add("--node-name", default=platform.node(), metavar="NAME", help="this node's name (%(default)s)")
    add("--address", default="127.0.0.1", metavar="HOST", help="where this node's engines listen (%(default)s)")
    add(
        "--state-dir",
        type=Path,
        default=_data_home() / "agent",
        metavar="DIR",
        help="what is to run, logs (%(default)s)",
    )
    add("--model-store", type=Path, default=_data_home() / "models", metavar="DIR", help="models (%(default)s)")
    add(
        "--devices",
        default="cpu",
        choices=("auto", "cpu", "gpu"),
        help="what engines may claim; auto: the GPUs, or the CPU if there are none. Engines of this version compute on "
        "the CPU whatever they claim (%(default)s)",
    )
    add(
        "--cpu-slots",
        type=count_from_1,
        default=1,
        metavar="N",
        help="replicas that share the CPU, each with cores of its own (1)",
    )
    add(
        "--restart-delay-max",
        type=seconds,
        default=30.0,
        metavar="S",
        help="longest wait before a failed engine starts again",
    )
    add("--stop-engines", action="store_true", help="drain and stop the engines when the agent ends")
    add(
        "--drain",
        type=seconds,
        default=30.0,
        metavar="S",
        help="with --stop-engines: how long requests may finish (30)",
    )
    add("--engine-command", type=shlex.split, metavar="COMMAND",
        help="launcher that takes the flags of `tidelane serve` (this program)")  # fmt: skip
    add("--tls-cert", type=Path, metavar="FILE", help="certificate for mutual TLS, needed unless listening on loopback")
    add("--tls-key", type=Path, metavar="FILE", help="its key")
    add("--tls-client-ca", type=Path, metavar="FILE", help="the CA whose clients are let in")
    add("--insecure", action="store_true", help="listen beyond loopback without TLS: anyone there may run models here")
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tidelane.agent.errors import CannotStart
    from tidelane.agent.inventory import find_inventory
    from tidelane.agent.server import run_agent

    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    try:
        asyncio.run(run_agent(_settings(args), find_inventory(args.devices, args.cpu_slots)))
    except CannotStart as error:
        print(f"tidelane agent: {error}", file=sys.stderr)
        return 1
    return 0


def _settings(args: argparse.Namespace) -> AgentSettings:
    from tidelane.agent.backoff import RestartPolicy
    from tidelane.agent.command import ENGINE_COMMAND
    from tidelane.agent.node import NodeSettings
    from tidelane.agent.server import AgentSettings

    return AgentSettings(
        node=NodeSettings(
            name=args.node_name,
            address=args.address,
            version=importlib.metadata.version("tidelane"),
            model_store=args.model_store.absolute(),
            engine_command=tuple(args.engine_command or ENGINE_COMMAND),
            restart=RestartPolicy(longest_delay_s=args.restart_delay_max),
        ),
        state_folder=args.state_dir,
        listen=args.listen,
        tls=_tls(args),
        insecure=args.insecure,
        stop_engines_after_s=args.drain if args.stop_engines else None,
    )


def _tls(args: argparse.Namespace) -> TlsPaths | None:
    from tidelane.agent.errors import CannotStart
    from tidelane.agent.server import TlsPaths

    files = (args.tls_cert, args.tls_key, args.tls_client_ca)
    if not any(files):
        return None
    if not all(files):
        raise CannotStart("--tls-cert, --tls-key and --tls-client-ca go together")
    return TlsPaths(*files)


def _data_home() -> Path:
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "tidelane"
