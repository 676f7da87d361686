"""What every command that runs a model is told: which one, and on what."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from tidelane.cli.numbers import count


def add_compute_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model",
        required=True,
        metavar="SOURCE",
        help="builtin://NAME, hf://ORG/NAME[@REV], file:///PATH, pvc://CLAIM/PATH",
    )
    add("--model-store", type=Path, metavar="DIR", help="where fetched and converted models are kept")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    add("--max-context-tokens", type=count, default=0, metavar="N", help="0: the model's own limit")
    add("--kv-pool-memory", type=count, default=0, metavar="BYTES", help="0: chosen from the free memory")
    add("--cores", type=cores, default=(), metavar="0,1", help="CPU cores to use (all)")


def cores(text: str) -> tuple[int, ...]:
    try:
        named = tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be core numbers with commas between, such as 0,1") from None
    if not set(named) <= os.sched_getaffinity(0):
        raise argparse.ArgumentTypeError(f"cores {text}: this process may use {sorted(os.sched_getaffinity(0))}")
    return named
