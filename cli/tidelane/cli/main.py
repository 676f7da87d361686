"""`tidelane`: finds the subcommand and imports nothing for the others."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Command:
    """`extra` is the part of the distribution that it needs."""

    name: str
    help: str
    extra: str

    @property
    def module(self) -> str:
        return f"tidelane.cli.{self.name.replace('-', '_')}"

    @property
    def exists(self) -> bool:
        return importlib.util.find_spec(self.module) is not None


_COMMANDS: Final = (
    Command("up", "serve what manifests declare, on this machine and without a cluster", "operator,agent,engine"),
    Command("serve", "run one engine", "engine"),
    Command("router", "choose a replica for each request", "router"),
    Command("agent", "run the node agent", "agent"),
    Command("operator", "run the Kubernetes operator", "operator"),
    Command("model", "fetch models into the store", "engine"),
    Command("profile", "measure a model's step times on this machine", "engine"),
    Command("profile-manifest", "print a measured profile as a ModelProfile manifest", "engine"),
    Command("bench", "send traffic to a service and report latency and goodput", "bench"),
    Command("kv-bench", "measure whether it pays to keep KV below the device", "engine"),
    Command("sketch", "print what traffic is like, to simulate by", "engine"),
    Command("simulate", "compare scheduling policies on any GPU, in virtual time", "engine"),
    Command("plan", "find the mode and the number of GPUs that meet targets", "engine"),
    Command("top", "watch services in the terminal", "operator"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    commands = [command for command in _COMMANDS if command.exists]
    named = next((command for command in commands if words[:1] == [command.name]), None)
    parser = argparse.ArgumentParser(
        prog="tidelane",
        description="Serves language models to latency targets, prefill and decode side by side.",
        epilog="tidelane COMMAND --help tells about a command.",
    )
    parser.add_argument("--version", action="version", version=importlib.metadata.version("tidelane"))
    parser.set_defaults(words=words)  # for reports that say how they were made
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    try:
        for command in commands:
            if command is named:
                importlib.import_module(command.module).register(subparsers)
            else:
                subparsers.add_parser(command.name, help=command.help)
        args = parser.parse_args(words)
        code: int = args.run(args)
    except ModuleNotFoundError as error:
        if named is None or error.name is None or error.name.split(".")[0] == "tidelane":
            raise
        print(
            f"tidelane {named.name} needs {error.name}, which is not installed: pip install 'tidelane[{named.extra}]'",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        # What a shell expects of a program that Ctrl-C ended.
        return 128 + signal.SIGINT
    return code


if __name__ == "__main__":
    sys.exit(main())
