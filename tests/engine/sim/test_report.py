"""What a comparison is written as: JSON by the letter, HTML that needs nothing else, tables."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console
from typing_extensions import override

from tidelane.engine.sim.charts import Axis, linear_axis, log_axis
from tidelane.engine.sim.contestants import Contestant, Setting
from tidelane.engine.sim.figures import figures_of
from tidelane.engine.sim.page import page
from tidelane.engine.sim.report import (
    Header,
    as_json,
    attainment_table,
    goodput_table,
    latency_table,
    telling_point,
)
from tidelane.engine.sim.sweep import Result
from tidelane.engine.sim.world import Answer, Settings, replay
from tidelane.engine.slo import Slo, Timeline

from .machines import SLO, machine, traffic
from .scenes import AUTO, CHUNKED, figures

HEADER = Header(
    "a<b.csv", 30, "llama", "H200", 1, SLO, 3, {"tidelane": "1"}, "tidelane simulate --seed 3", ("A note.",)
)


def result(contestant: Contestant, attainments: tuple[float, float], *, refined: bool = True) -> Result:
    points = tuple(figures(rate, share) for rate, share in zip((2.0, 4.0), attainments, strict=True))
    rates = {0.9: 2.25, 0.99: None} if refined else {}
    return Result(contestant, 1, points, (Setting("512 tokens"), Setting("by TPOT budget")), rates)


RESULTS = (result(CHUNKED, (0.95, 0.1)), result(AUTO, (1.0, 0.8)))


def test_the_json_has_the_fields_that_others_rely_on() -> None:
    plain = json.loads(json.dumps(as_json(HEADER, RESULTS), allow_nan=False))
    assert plain["header"]["trace"] == "a<b.csv"
    assert plain["header"]["slo"]["tpot_s"] == SLO.tpot_s
    assert {"model", "gpu", "seed", "versions", "command"} <= plain["header"].keys()
    assert list(plain["policies"]) == ["chunked/own", "auto/ours"]
    chunked = plain["policies"]["chunked/own"]
    assert chunked["rate_at_90"] == 2.25
    assert chunked["rate_at_99"] is None
    assert chunked["best_goodput_per_gpu"] == 1.9
    assert chunked["tuned_to"] == "512 tokens"
    assert chunked["points"][0] == {
        "rate": 2.0,
        "attainment": 0.95,
        "goodput_per_gpu": 1.9,
        "ttft_ms": {"p50": 100.0, "p90": 200.0, "p99": 400.0},
        "tpot_ms": {"p50": 100.0, "p90": 200.0, "p99": 400.0},
        "tbt_ms": {"p50": 100.0, "p90": 200.0, "p99": 400.0},
        "refused_late": 0.125,
        "aside_wait_s": {"p50": 1.0, "max": 4.0},
        "found": {
            "prompt_tokens": 1000,
            "cached_tokens": 400,
            "loaded_tokens": 200,
            "fetched_tokens": 100,
            "fetched_ahead": {"tokens": 0, "useful": 0, "wasted": 0},
            "loaded_ahead": {"tokens": 0, "useful": 0, "wasted": 0},
        },
    }


def test_what_there_is_none_of_is_null() -> None:
    lonely = Result(AUTO, 1, (replace(figures(1.0, 1.0, late=False), tpot=None, gap=None),), (Setting(),), {})
    (policy,) = as_json(HEADER, (lonely,))["policies"].values()
    assert policy["rate_at_90"] is policy["rate_at_99"] is policy["tuned_to"] is None
    (point,) = policy["points"]
    assert point["aside_wait_s"] is point["tpot_ms"] is point["tbt_ms"] is None


class _Reader(HTMLParser):
    """Checks that elements end, and collects attributes and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.names: list[str] = []

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag != "meta":
            self.open.append(tag)

    @override
    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    @override
    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else() -> None:
    text = page(HEADER, RESULTS)
    reader = _Reader()
    reader.feed(text)
    assert reader.open == []
    assert not {"script", "link", "img", "iframe", "object", "base"} & set(reader.names)
    assert not {"src", "href", "srcset", "xlink:href", "data"} & {name for name, _ in reader.attributes}
    assert not re.search(r"https?:|//|url\(|@import", text)
    assert "a&lt;b.csv" in text
    assert "a<b.csv" not in text
    assert "auto/ours" in text
    assert "tidelane simulate --seed 3" in text
    assert text == page(HEADER, RESULTS)
    assert reader.names.count("figure") == 2 + 2 + len(RESULTS)
    labels = [value for name, value in reader.attributes if name == "aria-label"]
    assert len(labels) == reader.names.count("figure")
    assert "NaN" not in text
    assert "nan" not in re.sub(r"[a-z]nan|nan[a-z]", "", text)


def test_a_page_of_one_rate_and_no_tokens() -> None:
    bare = replace(figures(1.0, 0.0), ttft_curve=(), tpot_curve=(), shares=(), ttft=None, tpot=None, gap=None)
    text = page(HEADER, (Result(AUTO, 1, (bare,), (Setting(),), {}),))
    assert "0.0%" in text


def test_tables_fit_a_narrow_terminal() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    many = tuple(
        replace(each, points=each.points * 3, settings=each.settings * 3) for each in RESULTS
    )  # as in a sweep of six rates
    for table in (latency_table(many, 0), attainment_table(HEADER, many), goodput_table(many)):
        console.print(table)
    told = console.export_text()
    assert "…" not in told
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in told.splitlines()]
    assert ["chunked/own", "2.25/s", "-", "1.9/s", "1", "512 tokens"] in rows
    assert ["auto/ours", *("100.0%", "80.0%") * 3] in rows


def test_the_telling_point_is_where_they_differ_most() -> None:
    assert telling_point(RESULTS) == 1
    assert telling_point(RESULTS[:1]) == 0


def test_figures_of_a_replay() -> None:
    sent = traffic(2)
    slo = Slo(ttft_s=1.0, tpot_s=0.1)
    on_time = Timeline(0.0, 0.5, 0.9, 1.0, 10, 2)
    late = Timeline(0.0, 1.75, 2.0, 2.0, 10, 1)
    answers = (Answer(sent.arrivals[0], on_time), Answer(sent.arrivals[1], late), Answer(sent.arrivals[1], None))
    empty = replay(traffic(1), machine(), lambda: AUTO.scheduler(Setting()), Settings(slo))
    found = figures_of(replace(empty, answers=answers), 6.0, slo)
    assert found.attainment == 1 / 3
    assert found.goodput == 2.0
    assert found.aside is not None
    assert (found.aside.p50_s, found.aside.max_s) == (0.75, 0.75)
    assert found.tpot is not None
    assert found.tpot.max_s == pytest.approx(0.1)
    assert found.ttft_curve[0] == 0.9
    assert found.ttft_curve[-1] == 2.0


def test_axes() -> None:
    assert linear_axis("", [0.0, 7.3]).ticks() == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert linear_axis("", []).high == 1.0
    assert log_axis("", [0.03, 4.0]).ticks() == [0.01, 0.1, 1.0, 10.0]
    assert log_axis("", [0.0]).part(0.0) == 0.0
    assert Axis("", 0.0, 10.0).part(12.0) == 1.0
    assert Axis("", 1.0, 100.0, log=True).part(10.0) == 0.5
