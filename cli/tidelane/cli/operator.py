"""`tidelane operator`: the operator as a process."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path

from tidelane.cli.numbers import seconds
from tidelane.operator.agents import OpenChannel, TlsPaths, plain_channel, tls_channels
from tidelane.operator.discovery import Agents
from tidelane.operator.errors import Deposed, NoCluster
from tidelane.operator.handlers import OperatorSettings, run_operator
from tidelane.operator.kubernetes_cluster import connect
from tidelane.operator.observation import Timing
from tidelane.operator.resources import ObjectRef

_DESCRIPTION = """Watches InferenceServices in a cluster and has the agents on its nodes run them. Run one at a time, or
several with the same --lease, of which one acts."""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    usual = Timing()
    parser = subparsers.add_parser("operator", help="run the Kubernetes operator", description=_DESCRIPTION)
    add = parser.add_argument
    add("--agents", action="append", required=True, metavar="HOST:PORT[,...]",
        help="agents to follow, dns:HOST:PORT for one at every address of HOST; repeatable")  # fmt: skip
    add("--kubeconfig", type=Path, metavar="FILE", help="which cluster (in a pod: its own; else the usual file)")
    add("--namespace", action="append", default=[], metavar="NAME", help="only this one; repeatable (all)")
    add("--liveness", metavar="URL",
        help="serve a liveness probe there, such as http://0.0.0.0:8080/healthz, and readiness at /readyz")  # fmt: skip
    add("--metrics", metavar="URL", help="serve Prometheus metrics there, such as http://0.0.0.0:8081/metrics")
    add("--lease", metavar="NAMESPACE/NAME",
        help="of several operators with this the one that holds that Lease acts, and the others stand by")  # fmt: skip
    add("--unreachable-after", type=seconds, default=usual.unreachable_s, metavar="S",
        help="without its agent for so long, a replica is not ready (%(default)s)")  # fmt: skip
    add("--move-after", type=seconds, default=usual.move_s, metavar="S",
        help="without its agent for so long, a replica is placed elsewhere (%(default)s)")  # fmt: skip
    add("--forget-after", type=seconds, default=usual.forget_s, metavar="S",
        help="without its agent for so long, a deletion no longer waits for a replica (%(default)s)")  # fmt: skip
    add("--scale-down-after", type=seconds, default=usual.stabilisation_s, metavar="S",
        help="one replica fewer must have met every target for so long, by prediction (%(default)s)")  # fmt: skip
    add("--agent-ca", type=Path, metavar="FILE", help="the CA of the agents' certificates, for mutual TLS")
    add("--agent-cert", type=Path, metavar="FILE", help="the operator's certificate for the agents")
    add("--agent-key", type=Path, metavar="FILE", help="its key")
    add("--agent-name", metavar="NAME", help="the name in the agents' certificates (the host by which one is reached)")
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    # At debug level it writes out every object that it reads.
    logging.getLogger("kubernetes_asyncio").setLevel(logging.INFO)
    if args.kubeconfig:
        # kopf has no other way to be told.
        os.environ["KUBECONFIG"] = str(args.kubeconfig)
    try:
        agents = Agents(target for each in args.agents for target in each.split(",") if target)
        asyncio.run(_run(args, agents, _channels(args)))
    except (NoCluster, ValueError) as error:
        print(f"tidelane operator: {error}", file=sys.stderr)
        return 2
    except Deposed as error:
        print(f"tidelane operator: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # while it stands by
        return 130
    return 0


async def _run(args: argparse.Namespace, agents: Agents, open_channel: OpenChannel) -> None:
    settings = OperatorSettings(
        agents=agents,
        namespaces=args.namespace,
        liveness=args.liveness,
        metrics=args.metrics,
        lease=_lease(args.lease),
        timing=Timing(
            unreachable_s=args.unreachable_after,
            move_s=args.move_after,
            forget_s=args.forget_after,
            stabilisation_s=args.scale_down_after,
        ),
    )
    client = await connect(str(args.kubeconfig) if args.kubeconfig else None)
    async with client:
        await run_operator(settings, client, open_channel)


def _lease(written: str | None) -> ObjectRef | None:
    if written is None:
        return None
    namespace, _, name = written.partition("/")
    if not namespace or not name or "/" in name:
        raise ValueError(f"--lease: {written} must be NAMESPACE/NAME, such as tidelane-system/tidelane-operator")
    return ObjectRef(namespace, name)


def _channels(args: argparse.Namespace) -> OpenChannel:
    files = (args.agent_ca, args.agent_cert, args.agent_key)
    if not any(files):
        if args.agent_name:
            raise ValueError(
                "--agent-name is looked for in certificates: give --agent-ca, --agent-cert and --agent-key"
            )
        return plain_channel
    if not all(files):
        raise ValueError("--agent-ca, --agent-cert and --agent-key go together")
    return tls_channels(TlsPaths(*files, agent_name=args.agent_name))
