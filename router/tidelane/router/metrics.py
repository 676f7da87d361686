"""What Prometheus sees of a router."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from typing_extensions import override

from tidelane.router.ask import Ask
from tidelane.router.backend import Backend
from tidelane.router.choice import Fitness, Ranked, Why
from tidelane.router.retries import Ended

# As the engine's, so that both can be laid over each other.
_TTFT_BUCKETS: Final = (
    .001, .005, .01, .02, .04, .06, .08, .1, .2, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
)  # fmt: skip
_RATIO_BUCKETS: Final = (0.125, 0.25, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2, 4, 8)

# How an answer that began has ended, beside the ways in which a try ends without one.
ANSWERED: Final = "answered"
LOST: Final = "stream_lost"
CLIENT_LEFT: Final = "client_left"
_OUTCOMES: Final = (ANSWERED, LOST, CLIENT_LEFT, *(ended.value for ended in Ended))


class Metrics:
    """`backends` gives those of now, `now_s` the clock of their books."""

    def __init__(self, backends: Callable[[], Mapping[str, Backend]], monotonic_s: Callable[[], float]) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(_BackendCollector(backends, monotonic_s))
        self._requests = self._counter(
            "requests", "Tries, by backend and how they ended; several where others were asked", "backend", "outcome"
        )
        self._responses = self._counter("http_responses", "Responses by status", "status")
        self._choices = self._counter("choices", "Choices of a backend, by what decided", "reason")
        self._retries = self._counter("retries", "Further backends asked, by how the one before ended", "reason")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens sent on, by estimate")
        self._resident = self._counter("resident_tokens", "Of these, those whose KV the backend should have kept")
        self._predicted = self._histogram("predicted_ttft_seconds", "TTFT of streams, as predicted", _TTFT_BUCKETS)
        self._measured = self._histogram("ttft_seconds", "TTFT of the same streams, from the choice on", _TTFT_BUCKETS)
        self._ratio = self._histogram("ttft_ratio", "TTFT measured over predicted", _RATIO_BUCKETS)
        # So that rates are defined from the start.
        for why in Why:
            self._choices.labels(why.value)
        for ended in Ended:
            self._retries.labels(ended.value)

    def response(self, status: int) -> None:
        self._responses.labels(str(status)).inc()

    def chosen(self, ask: Ask, ranked: Ranked, after: Ended | None) -> None:
        """`after` is how the try before ended."""
        self._choices.labels(ranked.why.value).inc()
        self._prompt.inc(ask.prompt_tokens)
        self._resident.inc(ranked.resident_tokens)
        if after is not None:
            self._retries.labels(after.value).inc()

    def ended(self, backend: str, outcome: str) -> None:
        self._requests.labels(backend, outcome).inc()

    def forget(self, backend: str) -> None:
        """One that is no longer there: where replicas come and go their labels would only become more."""
        for outcome in _OUTCOMES:
            with suppress(KeyError):
                self._requests.remove(backend, outcome)

    def first_byte(self, predicted_s: float, measured_s: float) -> None:
        self._predicted.observe(predicted_s)
        self._measured.observe(measured_s)
        if predicted_s > 0:
            self._ratio.observe(measured_s / predicted_s)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"tidelane_router_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"tidelane_router_{name}", text, buckets=buckets, registry=self._registry)


class _BackendCollector(Collector):
    """The books of the backends that there are, read when Prometheus asks."""

    def __init__(self, backends: Callable[[], Mapping[str, Backend]], monotonic_s: Callable[[], float]) -> None:
        self._backends = backends
        self._monotonic_s = monotonic_s

    @override
    def collect(self) -> Iterable[Metric]:
        now_s = self._monotonic_s()
        backends = self._backends()
        up = {name: float(each.fitness(now_s) is Fitness.HEALTHY) for name, each in backends.items()}
        yield _gauge("backend_up", "1 for a backend that gets requests", up)
        in_flight = {name: float(each.in_flight) for name, each in backends.items()}
        yield _gauge("in_flight", "Requests at a backend", in_flight)
        paces = {name: each.pace.factor(now_s) for name, each in backends.items()}
        yield _gauge("pace", "TTFT over its prediction, lately", paces)
        ejections = CounterMetricFamily(
            "tidelane_router_ejections", "Times a backend was left alone for failing", labels=["backend"]
        )
        for name, each in backends.items():
            ejections.add_metric([name], each.ejections)
        yield ejections


def _gauge(name: str, text: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"tidelane_router_{name}", text, labels=["backend"])
    for backend, value in values.items():
        family.add_metric([backend], value)
    return family
