"""What `tidelane kv-bench` says of its figures, and that a case counts only if it found what it should."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console

from tidelane.engine.bench.kv_rates import Ended, MovesLost
from tidelane.engine.bench.kv_report import KvReport, Setting, Sizes, as_json, met, table
from tidelane.engine.bench.kv_turns import Found, OtherCase, Place, Turns, disk_slots, host_slots, prompt_blocks
from tidelane.engine.bench.ratio import Measured, Ratio
from tidelane.engine.kv.layout import KVLayout
from tidelane.engine.kv.moves import Move, Store

LAYOUT = KVLayout(2, 3, key_dim=64, value_dim=64, element_bytes=4)
SETTING = Setting(
    model="builtin://some",
    dtype="float32",
    device="cpu: some",
    cores=(0, 1),
    memory_bytes=1 << 34,
    file_system="ext4",
    direct=True,
    token_bytes=LAYOUT.token_bytes,
    block_tokens=LAYOUT.block_tokens,
    load_average=0.25,
)
TURNS = Turns(
    {
        Place.NOWHERE: (6.0, 5.0, 7.0, 6.5, 5.5, 6.0),
        Place.DEVICE: (0.5, 0.25, 1.0),
        Place.HOST: (1.0, 1.5, 1.2),
        Place.DISK: (9.0, 3.0, 2.0),
    },
    (3, 1),
    (0, 1),
)
GAPS = Ratio(
    "p99 between steps",
    Measured("copies", (66.0,), "ms"),
    Measured("alone", (60.0,), "ms"),
    None,
    1.1,
    "4 streams",
)
REPORT = KvReport(SETTING, Sizes(rounds=3), (*TURNS.ratios(), GAPS))


def test_turns_are_compared_with_computing_them_by_medians() -> None:
    device, host, disk = TURNS.ratios()
    assert (device.value, host.value, disk.value) == (12.0, 5.0, 2.0)
    assert (met(device), met(host), met(disk), met(GAPS)) == (None, True, False, True)


def test_the_table_fits_a_terminal_and_tells_what_was_missed() -> None:
    console = Console(width=80)
    wide = Ratio(
        "fetches over raw reads", Measured("fetches", (0.998,), "GB/s"), Measured("memcpy", (0.111,), "GB/s"), 0.8
    )
    with console.capture() as told:
        console.print(table(replace(REPORT, ratios=(*REPORT.ratios, wide))))
    text = told.get()
    assert "…" not in text
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "fetches over raw reads fetches 0.998 GB/s memcpy 0.111 GB/s 8.99 ≥ 0.8 yes" in rows
    assert "TTFT, on the disk computed 6 s found 3 s 2 ≥ 3 NO" in rows
    assert "TTFT, in host memory computed 6 s found 1.2 s 5 ≥ 5 yes" in rows
    assert "TTFT, on the device computed 6 s found 0.5 s 12" in rows
    assert "p99 between steps copies 66 ms alone 60 ms 1.1 ≤ 1.1 yes" in rows


def test_notes_count_what_was_met_and_say_if_no_disk_was_measured() -> None:
    first, *rest = REPORT.notes
    assert first == (
        "builtin://some in float32: a history of 4000 tokens, 12 MB of KV, and 60 new ones; medians of 3 rounds or "
        "more."
    )
    assert rest == [
        "p99 between steps: 4 streams.",
        "Load average before it began: 0.2, on 2 cores.",
        "2 of 3 targets met.",
    ]
    cached = replace(REPORT, setting=replace(SETTING, direct=False, file_system="tmpfs"))
    (told,) = [line for line in cached.notes if line not in REPORT.notes]
    assert told.startswith(
        "The file system (tmpfs) takes no O_DIRECT: records and raw reads both went through the page"
    )


def test_json_holds_every_sample_and_verdict() -> None:
    plain = json.loads(json.dumps(as_json(REPORT)))
    device, _, disk, gaps = plain["ratios"]
    assert (device["value"], device["met"], device["at_least"]) == (12.0, None, None)
    assert (disk["value"], disk["met"], disk["at_least"]) == (2.0, False, 3.0)
    assert disk["under"] == {"name": "found", "samples": [9.0, 3.0, 2.0], "unit": "s", "median": 3.0}
    assert (gaps["value"], gaps["met"], gaps["at_most"]) == (1.1, True, 1.1)
    assert plain["sizes"] == {"history_tokens": 4000, "new_tokens": 60, "rounds": 3, "steps": 100}
    assert plain["setting"]["direct"] is True
    assert plain["notes"][-1] == "2 of 3 targets met."


@pytest.mark.parametrize(
    ("place", "wanted"),
    [
        (Place.DEVICE, Found(4000, 0, 0)),
        (Place.HOST, Found(4000, 250, 0)),
        (Place.DISK, Found(4000, 250, 250)),
        (Place.NOWHERE, Found(0, 0, 0)),
    ],
)
def test_a_case_that_found_something_else_is_an_error(place: Place, wanted: Found) -> None:
    assert Found.whole(place, 250, 16) == wanted
    wanted.check(place, wanted)
    for wrong in (Found(3984, 0, 0), Found(4000, 249, 0), Found(4000, 250, 249), Found(16, 1, 1)):
        with pytest.raises(OtherCase, match=f"to be found {place}, as .*{wanted.loaded_blocks}.*nothing can be said"):
            wrong.check(place, wanted)


@pytest.mark.parametrize("history_tokens", [16, 4000, 4003, 4004])
def test_tiers_are_too_small_for_another_prompt(history_tokens: int) -> None:
    sizes = Sizes(history_tokens)
    left = sizes.turn_tokens // LAYOUT.block_tokens  # names that a prompt leaves
    assert prompt_blocks(sizes, LAYOUT) - left <= 1
    assert host_slots(sizes, LAYOUT) == 2 * left
    assert disk_slots(sizes, LAYOUT) >= 5 * left


class ScriptedMover:
    """Ends each move at once, those of odd numbers badly."""

    def __init__(self, ended: Ended) -> None:
        self._ended = ended
        self._moves: list[tuple[Move, bool]] = []

    def start(self, moves: Sequence[Move]) -> None:
        for move in moves:
            self._moves.append((move, move.number % 2 == 0))
            self._ended.notify()

    def poll(self) -> Sequence[tuple[Move, bool]]:
        moves, self._moves = self._moves, []
        return moves

    def close(self) -> None:
        """Nothing runs."""


def test_moves_that_fail_have_no_rate() -> None:
    ended = Ended()
    mover = ScriptedMover(ended)
    assert ended.seconds(mover, [Store(number, b"a", 0, 0) for number in (0, 2, 4)]) >= 0
    with pytest.raises(MovesLost, match="2 of 3 copies of KV failed"):
        ended.seconds(mover, [Store(number, b"a", 0, 0) for number in (1, 2, 3)])
