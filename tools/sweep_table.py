"""Reports of `tidelane simulate --sweep --json` as Markdown tables, for the docs.

python tools/sweep_table.py a.json b.json >> docs/measurements/simulated-goodput.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def main() -> int:
    for name in sys.argv[1:]:
        print("\n".join(lines(json.loads(Path(name).read_text()))))
    return 0


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    header, policies = report["header"], report["policies"]
    rates = [point["rate"] for point in next(iter(policies.values()))["points"]]
    traffic = f"{header['trace']}, {header['requests']} requests"
    yield f"\n### {traffic}: {header['model']} on {header['gpu']}, {_targets(header)}\n"
    yield f"`{header['command']}`\n"
    at = " | ".join(f"at {rate:.3g}/s" for rate in rates)
    yield f"| policy/order | rate at 90 % | at 99 % | {at} | best | tuned to |"
    yield f"|---|---|---|{'---|' * len(rates)}---|---|"
    for policy, figures in policies.items():
        goodputs = " | ".join(f"{point['goodput_per_gpu']:.3g}" for point in figures["points"])
        sustained = f"{_rate(figures['rate_at_90'])} | {_rate(figures['rate_at_99'])}"
        best = f"{figures['best_goodput_per_gpu']:.3g}"
        yield f"| {policy} | {sustained} | {goodputs} | {best} | {figures['tuned_to'] or ''} |"


def _targets(header: Mapping[str, Any]) -> str:
    slo = header["slo"]
    allowance = f" + {1000 * slo['ttft_per_1k_input_tokens_s']:g} ms per 1,000 input tokens"
    return f"TTFT {1000 * slo['ttft_s']:g} ms{allowance}, TPOT {1000 * slo['tpot_s']:g} ms"


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.3g}"


if __name__ == "__main__":
    sys.exit(main())
