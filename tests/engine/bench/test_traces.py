"""Trace files in the formats of their authors, on made-up samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidelane.engine.bench.traces import BadTrace, TraceFormat, read_trace, within_ticks
from tidelane.engine.bench.traffic import Arrival, Traffic

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-01 10:00:00.5000000,120,10
2024-05-01 10:00:00.7500000,4000,1
2024-05-01 10:01:02.5000000,7,300
"""
MOONCAKE = """{"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 3000, "input_length": 20, "output_length": 9, "hash_ids": [2]}
{"timestamp": 6500, "input_length": 1200, "output_length": 1, "hash_ids": [0, 1, 3]}
"""
PLAIN = """{"at_s": 4.0, "input_tokens": 4, "output_tokens": 1}
{"at_s": 1.5, "input_tokens": 9, "output_tokens": 2}
"""


def test_azure_csv(tmp_path: Path) -> None:
    (tmp_path / "code.csv").write_text(AZURE)
    assert read_trace(tmp_path / "code.csv") == Traffic(
        (Arrival(0.0, 120, 10), Arrival(0.25, 4000, 1), Arrival(62.0, 7, 300)), 62.0
    )


def test_mooncake_jsonl(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(MOONCAKE)
    assert read_trace(tmp_path / "chats.jsonl") == Traffic(
        (
            Arrival(0.0, 700, 5, hash_ids=(0, 1)),
            Arrival(0.0, 20, 9, hash_ids=(2,)),
            Arrival(3.5, 1200, 1, hash_ids=(0, 1, 3)),
        ),
        3.5,
    )


def test_plain_jsonl(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text(PLAIN)
    assert read_trace(tmp_path / "mine.jsonl", TraceFormat.JSONL) == Traffic(
        (Arrival(0.0, 9, 2), Arrival(2.5, 4, 1)), 2.5
    )


def test_ticks_are_spread_and_stay_in_order() -> None:
    traffic = Traffic(tuple(Arrival(3.0 * (number // 5), 1, 1) for number in range(50)), 27.0)
    spread = within_ticks(traffic, 3.0, seed=1)
    times = [each.at_s for each in spread.arrivals]
    assert times == sorted(times)
    assert times[0] == 0.0
    assert len(set(times)) == 50
    assert 27.0 < spread.duration_s < 30.0
    assert spread == within_ticks(traffic, 3.0, seed=1)
    assert spread != within_ticks(traffic, 3.0, seed=2)


def test_arrivals_come_in_order(tmp_path: Path) -> None:
    lines = MOONCAKE.splitlines()
    (tmp_path / "chats.jsonl").write_text("\n".join(reversed(lines)) + "\n")
    assert [each.at_s for each in read_trace(tmp_path / "chats.jsonl").arrivals] == [0.0, 0.0, 3.5]


@pytest.mark.parametrize(("name", "text"), [("a.csv", AZURE), ("a.jsonl", MOONCAKE)])
def test_a_mark_at_the_start_and_blank_lines_are_passed_over(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    marked = tmp_path / f"marked-{name}"
    marked.write_text("\ufeff" + text.replace("\n", "\n\n  \n"))
    assert read_trace(marked) == read_trace(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", AZURE + "yesterday,1,1\n", r"a\.csv:5: TIMESTAMP: 'yesterday', expected a time"),
        ("a.csv", AZURE + "\n2024-05-01 10:02:00,-1,1\n", r"a\.csv:6: ContextTokens: '-1', expected a number from 1"),
        ("a.csv", AZURE + "2024-05-01 10:02:00,1,nan\n", r"a\.csv:5: GeneratedTokens: 'nan', expected a number"),
        ("a.csv", "TIME,IN\n1,2\n", r"a\.csv:2: TIMESTAMP is missing"),
        ("a.csv", AZURE + "2024-05-01 10:02:00,1\n", r"a\.csv:5: GeneratedTokens is missing"),
        ("a.csv", AZURE + "x" * 200_000 + "\n", r"a\.csv:5: field larger than field limit"),
        ("a.jsonl", MOONCAKE + '{"timestamp": 1}\n', r"a\.jsonl:4: input_length is missing"),
        ("a.jsonl", MOONCAKE.replace("3000", "NaN", 1), r"a\.jsonl:1: timestamp: 'nan', expected a number"),
        ("a.jsonl", MOONCAKE.replace("6500", "-1"), r"a\.jsonl:3: timestamp: '-1', expected a number from 0"),
        ("a.jsonl", MOONCAKE.replace("1200", "1e999"), r"a\.jsonl:3: input_length: 'inf', expected a number"),
        ("a.jsonl", MOONCAKE.replace("1200", "[1]"), r"a\.jsonl:3: input_length: '\[1\]', expected a number"),
        ("a.jsonl", MOONCAKE + "[" * 100_000 + "\n", r"a\.jsonl:4: nested too deeply"),
        ("a.jsonl", "[]\n", r"a\.jsonl:1: expected an object"),
        ("a.jsonl", "not json\n", r"a\.jsonl:1: Expecting value"),
        ("a.jsonl", MOONCAKE.replace("1200", "0"), r"a\.jsonl:3: input_length: '0', expected a number from 1"),
        ("a.jsonl", MOONCAKE.replace("[2]", "[true]"), r"a\.jsonl:2: hash_ids: expected a list"),
        ("a.jsonl", "", "no request"),
        ("a.txt", "", "expected a .csv"),
    ],
)
def test_what_is_no_trace_is_refused_by_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(BadTrace, match=message):
        read_trace(tmp_path / name)
