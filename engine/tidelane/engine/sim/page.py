"""A comparison as one HTML file that needs nothing else: charts, and the same figures as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from tidelane.engine.bench.report import Spread
from tidelane.engine.bench.tables import duration
from tidelane.engine.sim.charts import COLOURS, Area, Axis, Line, line_chart, linear_axis, log_axis, stacked_chart
from tidelane.engine.sim.report import Header, telling_point
from tidelane.engine.sim.shares import Share
from tidelane.engine.sim.sweep import Result
from tidelane.engine.slo import Slo

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 1160px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; } dt { opacity: .7; } dd { margin: 0; }
code { overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 1.2rem; }
figure { margin: 0; } figcaption { font-weight: 600; }
figure ul { list-style: none; display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin: 0; padding: 0 0 0 3rem; }
figure li { font-size: .85rem; white-space: nowrap; } figure li svg { margin-right: .3rem; }
.chart { width: 100%; height: auto; } .chart text { font-size: 12px; fill: currentColor; }
.grid { stroke: currentColor; stroke-opacity: .15; fill: none; }
.line { fill: none; stroke-width: 2.2; stroke-linejoin: round; stroke-linecap: round; }
.dot { stroke-width: 9; }
.mark { fill: none; stroke: currentColor; stroke-opacity: .5; stroke-dasharray: 1 4; stroke-width: 2; }
.table { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #8884; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
"""


def page(header: Header, results: Sequence[Result]) -> str:
    at = telling_point(results)
    rate = results[0].points[at].rate
    most = ", where policies differ most" if len(results) > 1 else ""
    latencies = (_ttft_chart(results, at), _tpot_chart(results, at, header.slo))
    charts = [_lanes_chart(result, at) for result in results if result.points[at].shares]
    lanes = ("<h2>What the first engine's units worked on, at that rate</h2>", _charts(charts)) if charts else ()
    sections = (
        f"<h1>{escape(header.trace)}: {escape(header.model)} on {escape(header.gpu)}</h1>",
        _about(header),
        "<h2>Goodput and attainment by rate</h2>",
        _charts((_goodput_chart(results), _attainment_chart(results))),
        f"<h2>Latencies at {rate:.3g} requests a second for each GPU{most}</h2>",
        _charts(latencies),
        *lanes,
        "<h2>All figures</h2>",
        _table(results),
    )
    title = escape(f"{header.trace} on {header.gpu}")
    body = "\n".join(sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _about(header: Header) -> str:
    slo = header.slo
    ttft = duration(slo.ttft_s)
    if slo.ttft_per_1k_input_tokens_s:
        ttft += f" and {duration(slo.ttft_per_1k_input_tokens_s)} for each 1,000 input tokens"
    rows = [
        ("Trace", f"{header.trace}, {header.requests} requests"),
        ("Targets", f"first token within {ttft}; {duration(slo.tpot_s)} for each output token"),
        ("GPUs", str(header.gpus)),
        ("Seed", str(header.seed)),
        ("Made with", ", ".join(f"{name} {version}" for name, version in header.versions.items())),
    ]
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in rows)
    notes = "".join(f"<li>{escape(note)}</li>" for note in header.notes)
    return f"<dl>{items}<dt>Command</dt><dd><code>{escape(header.command)}</code></dd></dl><ul>{notes}</ul>"


def _goodput_chart(results: Sequence[Result]) -> str:
    rates = [point.rate for point in results[0].points]
    lines = [
        _line(result, number, [(point.rate, point.goodput) for point in result.points])
        for number, result in _coloured(results)
    ]
    goodputs = [point.goodput for result in results for point in result.points]
    all_on_time = Line("all requests within targets", [(0.0, 0.0), (max(goodputs), max(goodputs))], "currentColor")
    return line_chart(
        "Goodput against rate",
        "Requests a second within their targets, against requests a second that arrive, for each GPU and policy. "
        + "; ".join(f"{each.contestant.name} at best {each.best.goodput:.3g}" for each in results),
        lines,
        linear_axis("requests a second for each GPU", rates),
        linear_axis("within targets, a second and GPU", goodputs),
        [all_on_time],
    )


def _attainment_chart(results: Sequence[Result]) -> str:
    rates = [point.rate for point in results[0].points]
    x = linear_axis("requests a second for each GPU", rates)
    lines = [
        _line(result, number, [(point.rate, 100 * point.attainment) for point in result.points])
        for number, result in _coloured(results)
    ]
    return line_chart(
        "Attainment against rate",
        "Per cent of requests within their targets, against requests a second for each GPU.",
        lines,
        x,
        Axis("% within targets", 0.0, 100.0),
        [Line("90 %", [(0.0, 90.0), (x.high, 90.0)], "currentColor")],
    )


def _ttft_chart(results: Sequence[Result], at: int) -> str:
    curves = [(number, result, result.points[at].ttft_curve) for number, result in _coloured(results)]
    return line_chart(
        "Time to first token",
        "Per cent of requests whose first token came within so many seconds. "
        + _medians((result, result.points[at].ttft) for result in results),
        [_line(result, number, _cumulative(curve)) for number, result, curve in curves],
        log_axis("seconds", [value for _, _, curve in curves for value in curve]),
        Axis("% of requests", 0.0, 100.0),
    )


def _tpot_chart(results: Sequence[Result], at: int, slo: Slo) -> str:
    curves = [
        (number, result, [1000 * value for value in result.points[at].tpot_curve])
        for number, result in _coloured(results)
    ]
    # The slowest few would squeeze all others into a corner.
    shown = [curve[-2] for _, _, curve in curves if curve]
    return line_chart(
        "Time per output token",
        "Per cent of requests whose tokens came within so many milliseconds on average. "
        + _medians((result, result.points[at].tpot) for result in results),
        [_line(result, number, _cumulative(curve)) for number, result, curve in curves],
        linear_axis("milliseconds", [min(max(shown, default=0.0), 4000 * slo.tpot_s), 1100 * slo.tpot_s]),
        Axis("% of requests", 0.0, 100.0),
        [Line("target", [(1000 * slo.tpot_s, 0.0), (1000 * slo.tpot_s, 100.0)], "currentColor")],
    )


def _lanes_chart(result: Result, at: int) -> str:
    shares = result.points[at].shares
    times = [edge for share in shares for edge in (share.begin_s, share.end_s)]

    def heights(name: str) -> list[float]:
        return [100 * value for share in shares for value in (getattr(share, name),) * 2]

    areas = [
        Area("decode", heights("decode"), COLOURS[0]),
        Area("prefill", heights("prefill"), COLOURS[4]),
        Area("both in one batch", heights("fused"), COLOURS[2]),
    ]
    means = ", ".join(f"{name} {_mean(shares, name):.0%}" for name in ("decode", "prefill", "fused"))
    return stacked_chart(
        result.contestant.name,
        f"Share of the device by what it worked on, over time. On average: {means}.",
        times,
        areas,
        linear_axis("seconds", times),
        Axis("% of units", 0.0, 100.0),
    )


def _mean(shares: Sequence[Share], name: str) -> float:
    passed_s = sum(share.end_s - share.begin_s for share in shares)
    worked_s = sum(float(getattr(share, name)) * (share.end_s - share.begin_s) for share in shares)
    return worked_s / passed_s if passed_s else 0.0


def _table(results: Sequence[Result]) -> str:
    names = ("policy/order", "rate", "attainment", "goodput", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99",
             "gap p99", "set aside, longest", "tuned to")  # fmt: skip
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    rows = [
        (
            result.contestant.name,
            f"{point.rate:.3g}",
            f"{point.attainment:.1%}",
            f"{point.goodput:.3g}",
            *(_cell(spread, part) for spread in (point.ttft, point.tpot) for part in ("p50_s", "p99_s")),
            _cell(point.gap, "p99_s"),
            _cell(point.aside, "max_s"),
            setting.name,
        )
        for result in results
        for point, setting in zip(result.points, result.settings, strict=True)
    ]
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(spread: Spread | None, part: str) -> str:
    return "" if spread is None else duration(getattr(spread, part))


def _medians(spreads: Iterable[tuple[Result, Spread | None]]) -> str:
    return "Medians: " + "; ".join(f"{result.contestant.name} {_cell(spread, 'p50_s')}" for result, spread in spreads)


def _cumulative(curve: Sequence[float]) -> list[tuple[float, float]]:
    return [(value, 100 * at / (len(curve) - 1)) for at, value in enumerate(curve)]


def _coloured(results: Sequence[Result]) -> list[tuple[int, Result]]:
    """Each with the number of its policy: both orders of one share a colour."""
    policies = list(dict.fromkeys(result.contestant.policy for result in results))
    return [(policies.index(result.contestant.policy), result) for result in results]


def _line(result: Result, number: int, points: Sequence[tuple[float, float]]) -> Line:
    return Line(
        result.contestant.name,
        points,
        COLOURS[number % len(COLOURS)],
        dashed=result.contestant.dashed,
    )


def _charts(charts: Iterable[str]) -> str:
    return f'<div class="charts">{"".join(charts)}</div>'
