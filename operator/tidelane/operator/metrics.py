"""What Prometheus sees of the operator: how long looks take, how late they come, what goes wrong, and who is there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Final, Protocol

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from typing_extensions import override

from tidelane.operator.answering import answered

_BUCKETS: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60)


class Control(Protocol):
    """What is there at the moment."""

    @property
    def waiting(self) -> int:
        """Names that are due, and that nobody looks at yet."""
        ...

    @property
    def agents_connected(self) -> int: ...

    @property
    def agents_lost(self) -> int: ...


class OperatorMetrics:
    """Of one process. `control` is there while this operator acts."""

    def __init__(self) -> None:
        self.control: Control | None = None
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(_Now(self))
        self._looks = Histogram(
            "tidelane_operator_reconcile_seconds",
            "How long a look at one service, or at all policies, took",
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self._late = Histogram(
            "tidelane_operator_queue_seconds",
            "From when a look was due until it began",
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self._errors = Counter(
            "tidelane_operator_reconcile_errors",
            "Looks that failed and come again; a Conflict is usual, anything but Retry, Conflict and Deposed a fault",
            ("error",),
            registry=self._registry,
        )
        for usual in ("Retry", "Conflict"):  # so that rates are defined from the start
            self._errors.labels(usual)

    def looked(self, late_s: float, took_s: float, error: BaseException | None) -> None:
        self._late.observe(late_s)
        self._looks.observe(took_s)
        if error is not None:
            self._errors.labels(type(error).__name__).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)

    @asynccontextmanager
    async def served(self, url: str | None) -> AsyncIterator[None]:
        """At that URL; None: nowhere. Raises ValueError if it cannot be."""
        if url is None:
            yield
            return
        async with answered("--metrics", url, self._answer, {}):
            yield

    def _answer(self) -> web.Response:
        return web.Response(body=self.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})


class _Now(Collector):
    def __init__(self, metrics: OperatorMetrics) -> None:
        self._metrics = metrics

    @override
    def collect(self) -> Iterable[Metric]:
        control = self._metrics.control
        acts = GaugeMetricFamily("tidelane_operator_acts", "1 if this operator acts, 0 while another does")
        acts.add_metric((), float(control is not None))
        yield acts
        if control is None:
            return
        waiting = GaugeMetricFamily("tidelane_operator_queue_length", "Looks that are due and have not begun")
        waiting.add_metric((), control.waiting)
        agents = GaugeMetricFamily("tidelane_operator_agents", "Agents heard of so far", labels=("state",))
        agents.add_metric(("connected",), control.agents_connected)
        agents.add_metric(("lost",), control.agents_lost)
        yield from (waiting, agents)
