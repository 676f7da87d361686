"""`tidelane router`: one address before the replicas of services."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator

from tidelane.cli.numbers import count_from_1, port, positive_seconds, seconds
from tidelane.router.address import Address
from tidelane.router.fleet import LONGEST_POLL_S, Rhythm
from tidelane.router.serve import RouterConfig, serve

_DESCRIPTION = """Passes OpenAI requests on to the replica that should meet their latency targets: by what waits there,
how fast prompts are computed there, and where the prompt's beginning was sent before. Run several beside each other
where one is not enough. It ends its streams on SIGTERM."""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    usual = Rhythm()
    parser = subparsers.add_parser("router", help="choose a replica for each request", description=_DESCRIPTION)
    add = parser.add_argument
    add("--backend", action="append", default=[], metavar="URL", help="a replica, as http://10.0.0.1:8000; repeatable")
    add("--backends-dns", action="append", default=[], metavar="HOST:PORT",
        help="a replica at every address of HOST, such as a headless Service's; repeatable")  # fmt: skip
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=port, default=8080, help="port to listen on (%(default)s)")
    add("--max-tries", type=count_from_1, default=3, metavar="N",
        help="ask at most N replicas, before the first byte of an answer (%(default)s)")  # fmt: skip
    add("--drain", type=seconds, default=30.0, metavar="S",
        help="how long streams may go on after SIGTERM (%(default)s)")  # fmt: skip
    add("--poll", type=positive_seconds, default=usual.poll_s, metavar="S",
        help="how often replicas are asked for their load (%(default)s)")  # fmt: skip
    add("--resolve", type=positive_seconds, default=usual.resolve_s, metavar="S",
        help="how often --backends-dns is looked up (%(default)s)")  # fmt: skip
    add("--connect-timeout", type=positive_seconds, default=usual.connect_timeout_s, metavar="S",
        help="a replica that does not take a connection within S counts as gone (%(default)s)")  # fmt: skip
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    logging.basicConfig(
        level=args.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    try:
        config = RouterConfig(
            args.host,
            args.port,
            backends=tuple(dict.fromkeys(_parsed("--backend", Address.of_url, args.backend))),
            names=tuple(dict.fromkeys(_parsed("--backends-dns", Address.of_host_port, args.backends_dns))),
            most_tries=args.max_tries,
            drain_s=args.drain,
            rhythm=Rhythm(poll_s=args.poll, resolve_s=args.resolve, connect_timeout_s=args.connect_timeout),
        )
        if not (config.backends or config.names):
            raise ValueError("name replicas with --backend URL or --backends-dns HOST:PORT")
        if args.poll > LONGEST_POLL_S:
            raise ValueError(f"--poll: {args.poll:g} must be at most {LONGEST_POLL_S:g}: what is heard grows stale")
    except ValueError as error:
        print(f"tidelane router: {error}", file=sys.stderr)
        return os.EX_USAGE
    return serve(config)


def _parsed(option: str, parse: Callable[[str], Address], texts: Iterable[str]) -> Iterator[Address]:
    for text in texts:
        try:
            yield parse(text)
        except ValueError as error:
            raise ValueError(f"{option}: {error}") from error
