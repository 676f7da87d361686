"""Pictures of decisions: what a log says, where it is drawn, and that those in the docs are drawn from recordings."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from tools.live.pictures import FOLDER, RECORDINGS, pictures
from tools.live.timeline import (
    AFTER_S,
    BEFORE_S,
    CORES_HEIGHT,
    CORES_Y,
    FILLS,
    HEIGHT,
    LEFT,
    RIGHT,
    WIDTH,
    Box,
    Recording,
    Work,
    boxes,
    describe,
    draw,
    longest_wait_s,
    shown,
)

from tidelane.engine.channel import LoggedDecision
from tidelane.engine.lanes.partition import Partition
from tidelane.engine.scheduling.plan import Decision
from tidelane.rpc.wire import ExecutionMode

CORES, LAYERS = 4, 30
WHOLE = Partition(CORES, CORES)
SPLIT = Partition(1, 3)


def decided(
    at_s: float,
    partition: Partition = WHOLE,
    *,
    decode: int = 0,
    tokens: int = 0,
    layers: tuple[int, int] | None = None,
) -> LoggedDecision:
    why = Decision("a reason", running=4, waiting=0)
    fused = bool(decode and tokens and partition == WHOLE)
    return LoggedDecision(at_s, why, partition, fused, decode, tokens, layers, 0, 0)


def recorded(*decisions: LoggedDecision, first_token_s: float = 9.0) -> Recording:
    return Recording("Auto", CORES, 1500, first_token_s, ((-1.0,),), decisions)


def test_a_fused_pass_has_all_cores_until_the_next_and_the_last_has_no_end() -> None:
    log = recorded(decided(1.0, decode=4, tokens=1500, layers=(0, LAYERS)), decided(2.0, decode=5))
    assert boxes(log) == [Box(Work.FUSED, 1.0, 2.0, 0, 4, ("1,500 tokens", "1,500"))]


def test_lanes_end_apart() -> None:
    log = recorded(
        decided(1.0, SPLIT, decode=4, tokens=256, layers=(0, 6)),
        decided(1.1, SPLIT, decode=4),
        decided(1.2, SPLIT, tokens=256, layers=(6, LAYERS)),
        decided(1.5, decode=5),
    )
    assert boxes(log) == [
        Box(Work.DECODE, 1.0, 1.1, 0, 1),
        Box(Work.PREFILL, 1.0, 1.2, 1, 4, ("layers 0-5", "0-5")),
        Box(Work.DECODE, 1.1, 1.5, 0, 1),
        Box(Work.PREFILL, 1.2, 1.5, 1, 4, ("layers 6-29", "6-29")),
    ]


def test_a_narrow_step_beside_a_slice_leaves_cores_idle() -> None:
    log = recorded(decided(1.0, Partition(1, 2), decode=4, tokens=256, layers=(0, 6)), decided(1.3, decode=4))
    assert [(box.first, box.last) for box in boxes(log)] == [(0, 1), (2, 4)]


def test_cores_idle_from_the_first_token_until_there_is_more_to_prefill() -> None:
    log = recorded(
        decided(1.0, SPLIT, tokens=256, layers=(20, LAYERS)),
        decided(5.0, SPLIT, tokens=256, layers=(0, LAYERS)),
        first_token_s=2.0,
    )
    assert [(box.start_s, box.end_s) for box in boxes(log)] == [(1.0, 2.0)]


def test_the_longest_wait_is_one_that_shows() -> None:
    chats = ((-3.0, -1.0, 0.1, 0.3), (0.2, 0.9, 2.5, 30.0))
    assert longest_wait_s(replace(recorded(), chats=chats, first_token_s=1.0)) == pytest.approx(1.6)


def test_what_is_kept_of_a_recording() -> None:
    """Some more than is shown, so that the first box has its start and the last its end."""
    log = recorded(*(decided(float(at_s), decode=4) for at_s in range(-5, 10)), first_token_s=2.0)
    kept = shown(replace(log, chats=((-4.0, 3.0, 20.0),)))
    assert [each.time_s for each in kept.decisions] == [-1.0, 0.0, 1.0, 2.0, 3.0]
    assert kept.chats == ((-4.0, 3.0),)


def scene() -> Recording:
    """The prompt comes: fused for a second, then lanes for as long, then decode alone."""
    decisions = [decided(-0.5 + 0.1 * number, decode=4) for number in range(5)]
    decisions.append(decided(0.0, decode=4, tokens=900, layers=(0, LAYERS)))
    decisions.append(decided(1.0, SPLIT, decode=4, tokens=600, layers=(0, LAYERS)))
    decisions += [decided(1.5, SPLIT, decode=4), decided(2.0, decode=5), decided(9.0, decode=5)]
    return Recording("Auto", CORES, 1500, 2.0, ((-1.0, -0.5, 1.0, 2.0), (-1.0, 1.0)), tuple(decisions))


def outlines(picture: str) -> dict[str, list[tuple[float, ...]]]:
    """By fill, what was drawn: left, top, width, height."""
    paths = re.findall(r'<path d="([^"]*)" fill="(#\w+)"', picture)
    box = re.compile(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h-[\d.]+z")
    return {fill: [tuple(map(float, each)) for each in box.findall(outline)] for outline, fill in paths}


def test_what_is_drawn_where() -> None:
    drawn = outlines(draw(scene()))
    second = (WIDTH - LEFT - RIGHT) / (BEFORE_S + 2 + AFTER_S)
    (fused,) = drawn[FILLS[Work.FUSED]]
    assert fused == pytest.approx((LEFT + BEFORE_S * second, CORES_Y, second, CORES_HEIGHT), abs=1)
    (prefill,) = drawn[FILLS[Work.PREFILL]]
    top = CORES_Y + CORES_HEIGHT / CORES
    assert prefill == pytest.approx((LEFT + (BEFORE_S + 1) * second, top, second, 0.75 * CORES_HEIGHT), abs=1)
    decode = drawn[FILLS[Work.DECODE]]
    assert len(decode) == 4 + 2 + 1  # one was over before
    assert min(box[0] for box in decode) == LEFT
    assert max(box[0] + box[2] for box in decode) == pytest.approx(WIDTH - RIGHT, abs=1)


def test_what_is_written() -> None:
    texts = [element.text for element in ElementTree.fromstring(draw(scene())).iter() if element.text]
    for expected in (
        "Auto",
        "1,500-token prompt",
        "first token after 2,000 ms",
        "longest wait between two tokens of a chat: 2,000 ms",
        "900 tokens",
        "600 tokens",
        "core 4",
        "0 ms",
        *Work,
    ):
        assert expected in texts


def test_a_picture_says_in_words_what_it_shows() -> None:
    said = (
        "Auto on 4 cores: 2 chats stream when a prompt of 1,500 tokens comes. Its first token takes 2,000 ms. Until "
        "then, decode steps: 2, slices of prefill: 1, passes that hold both: 1. The longest wait between two tokens of "
        "a chat: 2,000 ms."
    )
    assert describe(scene()) == said
    assert ElementTree.fromstring(draw(scene())).get("aria-label") == said


@pytest.fixture(scope="module")
def in_the_docs() -> dict[str, str]:
    """As they would be drawn now."""
    recordings = msgspec.json.decode((FOLDER / RECORDINGS).read_bytes(), type=dict[str, Recording])
    return pictures(recordings)


def test_each_mode_has_its_picture_in_the_docs(in_the_docs: dict[str, str]) -> None:
    assert set(in_the_docs) == {f"scheduling-{mode}.svg" for mode in ExecutionMode}
    text = Path(FOLDER.parent / "scheduling.md").read_text(encoding="utf-8")
    assert [name for name in in_the_docs if f"](pictures/{name})" not in text] == []


def test_pictures_in_the_docs_are_drawn_from_the_recordings(in_the_docs: dict[str, str]) -> None:
    for name, picture in in_the_docs.items():
        assert (FOLDER / name).read_text(encoding="utf-8") == picture


def test_pictures_in_the_docs_are_small_and_whole(in_the_docs: dict[str, str]) -> None:
    for picture in in_the_docs.values():
        assert len(picture.encode()) < 30_000
        for element in ElementTree.fromstring(picture).iter():
            x, y = element.get("x"), element.get("y")
            if x is not None and y is not None:
                assert 0 <= float(x) <= WIDTH
                assert 0 <= float(y) <= HEIGHT
