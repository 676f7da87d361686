"""What the operator's /metrics say."""

from __future__ import annotations

from dataclasses import dataclass

from tidelane.operator.errors import Conflict
from tidelane.operator.metrics import OperatorMetrics


@dataclass(frozen=True)
class Control:
    waiting: int = 3
    agents_connected: int = 5
    agents_lost: int = 2


def values(metrics: OperatorMetrics) -> dict[str, float]:
    lines = [line for line in metrics.text().decode().splitlines() if line.startswith("tidelane")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_looks_are_counted_and_errors_told_by_kind() -> None:
    metrics = OperatorMetrics()
    metrics.looked(late_s=0.5, took_s=0.02, error=None)
    metrics.looked(late_s=0.0, took_s=0.02, error=Conflict("again"))
    metrics.looked(late_s=0.0, took_s=0.02, error=ZeroDivisionError())
    told = values(metrics)
    assert told["tidelane_operator_reconcile_seconds_count"] == 3
    assert told["tidelane_operator_queue_seconds_sum"] == 0.5
    assert {name: value for name, value in told.items() if "errors_total" in name} == {
        'tidelane_operator_reconcile_errors_total{error="Conflict"}': 1,
        'tidelane_operator_reconcile_errors_total{error="Retry"}': 0,
        'tidelane_operator_reconcile_errors_total{error="ZeroDivisionError"}': 1,
    }


def test_who_stands_by_says_so_and_knows_of_no_agents() -> None:
    metrics = OperatorMetrics()
    assert values(metrics)["tidelane_operator_acts"] == 0
    assert not any("agents" in name for name in values(metrics))
    metrics.control = Control()
    told = values(metrics)
    assert told["tidelane_operator_acts"] == 1
    assert told["tidelane_operator_queue_length"] == 3
    assert told['tidelane_operator_agents{state="connected"}'] == 5
    assert told['tidelane_operator_agents{state="lost"}'] == 2
