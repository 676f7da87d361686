"""`tidelane model pull`: fetch a model into the store before it is needed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("model", help="look after the model store")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    pull = actions.add_parser("pull", help="fetch a model, convert it if need be, and print its folder")
    pull.add_argument("source", help="builtin://NAME, hf://ORG/NAME[@REV], file:///PATH")
    pull.add_argument("--model-store", type=Path, metavar="DIR")
    pull.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tidelane.engine.errors import CannotServe
    from tidelane.engine.model.store import default_store, resolve

    try:
        folder = resolve(args.source, args.model_store or default_store(), lambda line: print(line, file=sys.stderr))
    except (CannotServe, OSError) as error:
        # Libraries tell theirs over several lines.
        print(f"tidelane model pull: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(folder)
    return 0
