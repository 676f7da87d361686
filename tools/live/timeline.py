"""What the cores did around one long prompt, as an SVG drawn from a log of decisions and from what clients saw.

Pure: the same recording gives the same text. All colours suit light pages and dark ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from math import inf

from tidelane.engine.channel import LoggedDecision
from tidelane.engine.sim.charts import COLOURS, Axis

# Shown before the prompt was sent, and after its first token.
BEFORE_S, AFTER_S = 0.4, 0.8
# Kept on both sides of that: the first work shown began earlier, the last ends later.
MARGIN_S = 1.0

WIDTH, HEIGHT = 860, 216
LEFT, RIGHT = 136, 32
ROW = 12  # height of what a client saw
PROMPT_Y, TOKENS_Y, CORES_Y = 34, 52, 74
CORES_HEIGHT = 84
LEGEND_Y = 206
ROOM_FOR_WAIT = 170  # "first token after 99,999 ms"
GAP = 0.8  # between neighbours, on pages of any colour
SMALL = 9.5  # font size of labels on boxes
CHARACTER = 0.6 * SMALL  # about the mean width
# As far from white as from GitHub's dark page, near enough: 4.5 and 4.2 to 1.
INK = "#707880"


class Work(StrEnum):
    DECODE = "decode step"
    PREFILL = "prefill: tokens, or layers of a slice"
    FUSED = "both in one pass: tokens of the prompt"


FILLS = {Work.DECODE: COLOURS[0], Work.PREFILL: COLOURS[4], Work.FUSED: COLOURS[2]}


@dataclass(frozen=True, slots=True)
class Box:
    """Work on the cores [first, last). `labels`: the first that fits is written on it."""

    work: Work
    start_s: float
    end_s: float
    first: int
    last: int
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Recording:
    """Chats stream, and a long prompt comes. All times, those of `decisions` too, are since it was sent.

    `chats`: when the tokens of each reached its client; `first_token_s`: when the prompt's first did.
    """

    mode: str
    cores: int
    prompt_tokens: int
    first_token_s: float
    chats: tuple[tuple[float, ...], ...]
    decisions: tuple[LoggedDecision, ...]

    @property
    def until_s(self) -> float:
        return self.first_token_s + AFTER_S


def shown(recording: Recording) -> Recording:
    """Without decisions long before the prompt, and all that came long after it."""
    from_s, until_s = -BEFORE_S - MARGIN_S, recording.until_s + MARGIN_S
    return replace(
        recording,
        chats=tuple(tuple(at_s for at_s in chat if at_s < until_s) for chat in recording.chats),
        decisions=tuple(each for each in recording.decisions if from_s < each.time_s < until_s),
    )


def draw(recording: Recording) -> str:
    time = Axis("", -BEFORE_S, recording.until_s)
    seen = [each for each in boxes(recording) if each.end_s > time.low and each.start_s < time.high]
    wait = _ms(longest_wait_s(recording))
    label = f'aria-label="{describe(recording)}"'
    style = f'font-family="sans-serif" font-size="12" fill="{INK}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" {label} {style}>',
        f"<title>{recording.mode}: what the cores do around a long prompt</title>",
        _text(LEFT, 18, recording.mode, 'font-size="14" font-weight="bold"'),
        _text(WIDTH - RIGHT, 18, f"longest wait between two tokens of a chat: {wait}", 'text-anchor="end"'),
        *_time(time),
        *_prompt(recording, time),
        *_tokens(recording.chats[0], time),
        *_cores(seen, recording.cores, time),
        *_legend({box.work for box in seen}),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def describe(recording: Recording) -> str:
    """The picture in words, up to the prompt's first token."""
    first = recording.first_token_s
    counts = Counter(box.work for box in boxes(recording) if 0 <= box.start_s < first)
    return (
        f"{recording.mode} on {recording.cores} cores: {len(recording.chats)} chats stream when a prompt of "
        f"{recording.prompt_tokens:,} tokens comes. Its first token takes {_ms(first)}. Until then, decode steps: "
        f"{counts[Work.DECODE]}, slices of prefill: {counts[Work.PREFILL]}, passes that hold both: "
        f"{counts[Work.FUSED]}. The longest wait between two tokens of a chat: {_ms(longest_wait_s(recording))}."
    )


def boxes(recording: Recording) -> list[Box]:
    """By when they began. The log has no ends: a box ends when one of its cores was given the next work.

    The prompt's last slice may be followed by nothing: it ends when the first token came.
    """
    decisions, cores = recording.decisions, recording.cores
    layers = max((each.layers[1] for each in decisions if each.layers is not None), default=0)
    found: list[Box] = []
    for number, decision in enumerate(decisions):
        for work, first, last in _launched(decision, cores):
            end_s = _next_use_s(decisions[number + 1 :], cores, first, last)
            if work is Work.PREFILL and decision.time_s < recording.first_token_s:
                end_s = min(end_s, recording.first_token_s)
            if end_s < inf:
                found.append(Box(work, decision.time_s, end_s, first, last, _labels(decision, work, layers)))
    return found


def longest_wait_s(recording: Recording) -> float:
    """Between two tokens of one chat, from when the prompt came until a little after its first token."""
    return max(
        (
            later - earlier
            for chat in recording.chats
            for earlier, later in pairwise(chat)
            if later > 0 and earlier < recording.until_s
        ),
        default=0.0,
    )


def _launched(decision: LoggedDecision, cores: int) -> Iterator[tuple[Work, int, int]]:
    """Decode has the first cores, prefill the last."""
    if decision.fused:
        yield Work.FUSED, 0, cores
        return
    if decision.decode_sequences:
        yield Work.DECODE, 0, decision.partition.decode_units
    if decision.layers is not None:
        yield Work.PREFILL, cores - decision.partition.prefill_units, cores


def _next_use_s(later: Iterable[LoggedDecision], cores: int, first: int, last: int) -> float:
    """Of any of these cores; infinite if there is none."""
    for decision in later:
        if any(first < other_last and other_first < last for _, other_first, other_last in _launched(decision, cores)):
            return decision.time_s
    return inf


def _labels(decision: LoggedDecision, work: Work, layers: int) -> tuple[str, ...]:
    if work is Work.DECODE or decision.layers is None:
        return ()
    first, end = decision.layers
    if (first, end) != (0, layers):
        return (f"layers {first}-{end - 1}", f"{first}-{end - 1}")
    tokens = f"{decision.prefill_tokens:,}"
    return (f"{tokens} tokens", tokens)


# ---- drawing ----------------------------------------------------------------------------------------------------


def _x(time: Axis, at_s: float) -> float:
    return LEFT + time.part(at_s) * (WIDTH - LEFT - RIGHT)


def _time(time: Axis) -> Iterator[str]:
    top, bottom = PROMPT_Y - 4, CORES_Y + CORES_HEIGHT + 5
    ticks = time.ticks()
    lines = "".join(f"M{_x(time, tick):.1f} {top}V{bottom}" for tick in ticks)
    yield f'<path d="{lines}" stroke="{INK}" stroke-opacity="0.3"/>'
    yield f'<path d="M{_x(time, 0):.1f} {top}V{bottom}" stroke="{INK}" stroke-width="1.5"/>'
    for tick in ticks:
        yield _text(_x(time, tick), bottom + 13, _ms(tick), 'text-anchor="middle"')


def _prompt(recording: Recording, time: Axis) -> Iterator[str]:
    """A bar from when it was sent to its first token."""
    start, end = _x(time, 0), _x(time, recording.first_token_s)
    yield _row_name(f"{recording.prompt_tokens:,}-token prompt", PROMPT_Y + ROW - 2)
    yield f'<rect x="{start:.1f}" y="{PROMPT_Y}" width="{end - start:.1f}" height="{ROW}" fill-opacity="0.3"/>'
    words = f"first token after {_ms(recording.first_token_s)}"
    if end + ROOM_FOR_WAIT < WIDTH - RIGHT:
        yield _text(end + 5, PROMPT_Y + ROW - 2, words)
    else:
        yield _text(end - 5, PROMPT_Y + ROW - 2, words, 'text-anchor="end"')


def _tokens(chat: Sequence[float], time: Axis) -> Iterator[str]:
    yield _row_name("tokens of a chat", TOKENS_Y + ROW - 2)
    lines = "".join(f"M{_x(time, at_s):.1f} {TOKENS_Y}v{ROW}" for at_s in chat if time.low < at_s < time.high)
    yield f'<path d="{lines}" stroke="{INK}" stroke-width="1.6"/>'


def _cores(seen: Sequence[Box], cores: int, time: Axis) -> Iterator[str]:
    core_height = CORES_HEIGHT / cores
    if cores <= 4:
        for number in range(cores):
            yield _row_name(f"core {number + 1}", CORES_Y + (number + 0.5) * core_height + 4)
    else:
        yield _row_name(f"{cores} cores", CORES_Y + CORES_HEIGHT / 2 + 4)
    labels: list[str] = []
    for work in Work:
        outlines = ""
        for box in seen:
            if box.work is not work:
                continue
            left, top = _x(time, box.start_s), CORES_Y + box.first * core_height
            # However short, it is seen.
            width = max(1.0, _x(time, box.end_s) - left - GAP)
            height = (box.last - box.first) * core_height - GAP
            outlines += f"M{left:.1f} {top:.1f}h{width:.1f}v{height:.1f}h-{width:.1f}z"
            labels += _label(box.labels, left + width / 2, top + height / 2, width, height)
        if outlines:
            yield f'<path d="{outlines}" fill="{FILLS[work]}"/>'
    yield f'<g font-size="{SMALL}" fill="#000" text-anchor="middle">{"".join(labels)}</g>'


def _label(labels: Iterable[str], x: float, y: float, width: float, height: float) -> Iterator[str]:
    """The first that fits, along or upright."""
    for label in labels:
        length = CHARACTER * len(label) + 3
        if length <= width:
            yield _text(x, y + SMALL / 3, label)
            return
        if length <= height and width >= SMALL:
            middle = x + SMALL / 3
            yield _text(middle, y, label, f'transform="rotate(-90 {middle:.1f} {y:.1f})"')
            return


def _legend(works: set[Work]) -> Iterator[str]:
    for number, work in enumerate(each for each in Work if each in works):
        x = LEFT + (0, 120, 400)[number]
        yield f'<rect x="{x}" y="{LEGEND_Y - 9}" width="14" height="10" fill="{FILLS[work]}"/>'
        yield _text(x + 19, LEGEND_Y, work)


def _row_name(name: str, y: float) -> str:
    return _text(LEFT - 8, y, name, 'text-anchor="end"')


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{" " + attributes if attributes else ""}>{text}</text>'


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms"
