"""How the execution modes differ, one picture each: `docs/pictures/scheduling-MODE.svg`, drawn from real decisions.

    python -m tools.live.pictures
    python -m tools.live.pictures --modes Lanes      # records this one again
    python -m tools.live.pictures --redraw           # records nothing

Each mode serves the same scene by `tidelane serve`: three chats stream, a long prompt comes, joins them and ends. What
was launched and when is read from `GET /debug/decisions`, and kept in `recordings.json` beside the pictures.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
import urllib.request
from pathlib import Path

import msgspec
from rich.console import Console
from tools.live.rig import NAME, modes, refusing, running_engine
from tools.live.timeline import Recording, draw, shown

from tidelane.cli.interrupts import run_interruptible
from tidelane.cli.targets import BadOption, parse_slo
from tidelane.engine.bench.client import ChatClient
from tidelane.engine.bench.http_stream import Target
from tidelane.engine.bench.outcome import Outcome
from tidelane.engine.bench.traffic import Arrival
from tidelane.engine.channel import LoggedDecision
from tidelane.engine.decisions import KEPT_DECISIONS
from tidelane.engine.slo import Slo
from tidelane.rpc.wire import ExecutionMode

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
RECORDINGS = "recordings.json"
# Chats outlast the picture.
CHATS = tuple(Arrival(0.2 * number, 40, 240) for number in range(3))
PROMPT = Arrival(4.0, 900, 24)


class Answer(msgspec.Struct, frozen=True):
    """That of `GET /debug/decisions`; its times are of the clock that this process has too."""

    decisions: tuple[LoggedDecision, ...]


def main() -> int:
    args = _parser().parse_args()
    slo = parse_slo(args.slo)
    if not args.out.is_dir():
        raise BadOption(f"--out: there is no folder {args.out}: make it first")
    kept = args.out / RECORDINGS
    recordings = msgspec.json.decode(kept.read_bytes(), type=dict[str, Recording]) if kept.exists() else {}
    for mode in () if args.redraw else args.modes:
        recordings[mode] = _record(mode, slo)
        kept.write_bytes(msgspec.json.encode(recordings) + b"\n")
    console = Console(highlight=False)
    for path, picture in pictures(recordings).items():
        (args.out / path).write_text(picture, encoding="utf-8")
        console.print(f"{path}: {len(picture) / 1000:.0f} kB")
    return 0


def pictures(recordings: dict[str, Recording]) -> dict[str, str]:
    """By the name of the file."""
    return {f"scheduling-{mode}.svg": draw(each) for mode, each in recordings.items()}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--modes", type=modes, default=list(ExecutionMode), help="to be recorded, by comma (all)")
    add("--redraw", action="store_true", help="what was recorded before")
    add("--slo", default="ttft=4s,tpot=250ms", help="targets for this machine (%(default)s)")
    add("--out", type=Path, default=FOLDER, help="folder of the pictures (docs/pictures)")
    return parser


def _record(mode: ExecutionMode, slo: Slo) -> Recording:
    with running_engine(mode, slo) as url:
        *chats, prompt = run_interruptible(_played(url))
        with urllib.request.urlopen(f"{url}/debug/decisions?limit={KEPT_DECISIONS}", timeout=30) as answer:
            decisions = msgspec.json.decode(answer.read(), type=Answer).decisions

    def since(at_s: float) -> float:
        return round(at_s - prompt.sent_s, 4)

    recording = Recording(
        mode,
        len(os.sched_getaffinity(0)),
        PROMPT.input_tokens,
        since(prompt.token_times_s[0]),
        tuple(tuple(since(at_s) for at_s in chat.token_times_s) for chat in chats),
        tuple(msgspec.structs.replace(each, time_s=since(each.time_s)) for each in decisions),
    )
    return shown(recording)


async def _played(url: str) -> list[Outcome]:
    """The scene, once the client knows how the server counts tokens; the prompt last."""
    client = await ChatClient(Target.parse(url), NAME, time.monotonic).measured()
    start_s = time.monotonic()

    async def ask(arrival: Arrival) -> Outcome:
        await asyncio.sleep(start_s + arrival.at_s - time.monotonic())
        outcome = await client.ask(arrival, f"picture:{arrival.at_s}")
        if outcome.failure is not None:
            raise SystemExit(f"a request of the scene failed: {outcome.failure}: {outcome.detail}")
        return outcome

    return list(await asyncio.gather(*map(ask, (*CHATS, PROMPT))))


if __name__ == "__main__":
    sys.exit(refusing(main))
