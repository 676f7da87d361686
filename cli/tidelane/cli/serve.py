"""`tidelane serve`: one engine, without agent or operator."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from google.protobuf import json_format

from tidelane.cli.compute import add_compute_arguments
from tidelane.cli.numbers import count, port, positive_seconds
from tidelane.rpc import serving_pb2
from tidelane.rpc.wire import objective_from_wire

DEFAULT_OBJECTIVE = (
    '{"slo": {"ttftS": 2.0, "ttftPer1kInputTokensS": 2.0, "tpotS": 0.2, "percentile": 90}, "mode": "LANES"}'
)

_DESCRIPTION = """Serves one model by OpenAI's API. An agent starts it so; by hand it is for trying a model out."""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("serve", help="run one engine", description=_DESCRIPTION)
    add_compute_arguments(parser)
    add = parser.add_argument
    add("--served-name", metavar="NAME", help='what clients put in "model" (the source without its scheme)')
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=port, default=8000, help="port to listen on (%(default)s)")
    add(
        "--objective",
        default=DEFAULT_OBJECTIVE,
        metavar="JSON",
        help="targets and mode, as JSON of the Objective message",
    )
    add("--control-socket", type=Path, metavar="PATH", help="Unix socket for the agent")
    add(
        "--profile",
        type=Path,
        metavar="FILE",
        help="measured step times, from `tidelane profile` (the one it keeps in the model store for this model, dtype, "
        "device and cores; without one, a few passes are timed at the start)",
    )
    add(
        "--kv-host-memory",
        type=count,
        default=0,
        metavar="BYTES",
        help="host memory for KV that has no room in the pool (%(default)s)",
    )
    add(
        "--kv-disk-memory",
        type=count,
        default=0,
        metavar="BYTES",
        help="of disk for KV that has no room in host memory; it outlives the engine (%(default)s)",
    )
    add("--kv-disk-folder", type=Path, metavar="DIR", help="where that is: a folder of this engine alone")
    add(
        "--kv-dtype",
        default="auto",
        choices=("auto", "bf16", "fp8", "int8", "int4"),
        help="how KV is held below the device (%(default)s: bit for bit; the others round)",
    )
    add(
        "--kv-idle-timeout",
        type=positive_seconds,
        metavar="SECONDS",
        help="KV that nobody used for so long goes first when room is needed (1800)",
    )
    add(
        "--kv-prefetch",
        action="store_true",
        help="bring KV up from below the device before its conversation should go on",
    )
    add(
        "--device",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="where to run (%(default)s: a GPU if there is one and no --cores are given)",
    )
    add(
        "--queue-limit",
        type=count,
        default=256,
        metavar="N",
        help="requests that may wait; more get 429 (%(default)s)",
    )
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tidelane.engine.config import ServeConfig
    from tidelane.engine.model.store import default_store
    from tidelane.engine.serve import serve

    logging.basicConfig(
        level=args.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    try:
        objective = objective_from_wire(json_format.Parse(args.objective, serving_pb2.Objective()))
    except (json_format.ParseError, ValueError) as error:
        print(f"tidelane serve: --objective: {error}", file=sys.stderr)
        return os.EX_CONFIG
    if args.kv_disk_memory and args.kv_disk_folder is None:
        print("tidelane serve: --kv-disk-memory: name a folder for it with --kv-disk-folder", file=sys.stderr)
        return os.EX_CONFIG
    if args.kv_dtype != "auto" and not (args.kv_host_memory or args.kv_disk_memory):
        print(
            "tidelane serve: --kv-dtype: is of KV below the device: add --kv-host-memory or --kv-disk-memory",
            file=sys.stderr,
        )
        return os.EX_CONFIG
    if args.kv_prefetch and not (args.kv_host_memory or args.kv_disk_memory):
        print(
            "tidelane serve: --kv-prefetch: is of KV below the device: add --kv-host-memory or --kv-disk-memory",
            file=sys.stderr,
        )
        return os.EX_CONFIG
    return serve(
        ServeConfig(
            model=args.model,
            model_store=args.model_store or default_store(),
            served_name=args.served_name or args.model.partition("://")[2],
            objective=objective,
            host=args.host,
            port=args.port,
            dtype=args.dtype,
            max_context_tokens=args.max_context_tokens or None,
            kv_pool_bytes=args.kv_pool_memory or None,
            control_socket=args.control_socket,
            cores=args.cores,
            device=args.device,
            profile=args.profile,
            kv_host_bytes=args.kv_host_memory,
            kv_disk_bytes=args.kv_disk_memory,
            kv_disk_folder=args.kv_disk_folder,
            kv_dtype=args.kv_dtype,
            kv_idle_timeout_s=args.kv_idle_timeout,
            kv_prefetch=args.kv_prefetch,
            queue_limit=args.queue_limit,
            log_level=args.log_level,
        )
    )
