"""A process with many simulated agents, each a gRPC server of its own on loopback.

It prints one JSON line with the address of each agent by node name, then answers each line of its input with one JSON
line: what every node has. It ends with its input.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc.aio

from scale.simulated import SimulatedNode
from tidelane.agent.service import NodeAgentService
from tidelane.rpc.node_agent_pb2_grpc import add_NodeAgentServicer_to_server

# Each node has an address of its own that Kubernetes takes in an EndpointSlice; nothing listens there.
_NODES_PER_SUBNET = 250


@dataclass(frozen=True)
class RunningAgent:
    node: SimulatedNode
    server: grpc.aio.Server
    target: str

    @classmethod
    async def start(cls, index: int, args: argparse.Namespace) -> Self:
        address = f"10.20.{index // _NODES_PER_SUBNET}.{index % _NODES_PER_SUBNET + 1}"
        node = SimulatedNode(f"node-{index:04d}", address, args.devices, args.load, args.folder)
        await node.start()
        server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        add_NodeAgentServicer_to_server(NodeAgentService(node), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return cls(node, server, f"127.0.0.1:{port}")

    async def stop(self) -> None:
        await self.node.stop(None)
        await self.server.stop(None)

    def report(self) -> list[dict[str, Any]]:
        return [
            {
                "node": self.node.name,
                "replica": f"{ref.namespace}/{ref.service}/{ref.index}",
                "launches": self.node.launches[ref],
            }
            for ref in self.node.present
        ]


async def serve(args: argparse.Namespace) -> None:
    agents = [await RunningAgent.start(index, args) for index in range(args.first, args.first + args.agents)]
    print(json.dumps({each.node.name: each.target for each in agents}), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps([line for each in agents for line in each.report()]), flush=True)
    await asyncio.gather(*(each.stop() for each in agents))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, required=True)
    parser.add_argument("--first", type=int, required=True, help="number of the first one")
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--load", type=float, required=True, help="seconds until an engine is ready")
    parser.add_argument("--folder", type=Path, required=True)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
