"""What Prometheus sees: vLLM's names under `tidelane_`, so that dashboards carry over, and our own beside them.

Latencies are taken from the loop's time stamps as its messages arrive, never from when a client reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from typing_extensions import override

from tidelane.engine.channel import Ahead, Heartbeat, Moved, RefusalReason, Tokens
from tidelane.engine.request import FinishReason, Request
from tidelane.engine.slo import Slo, Timeline

_TTFT_BUCKETS = (
    .001, .005, .01, .02, .04, .06, .08, .1, .2, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
)  # fmt: skip
_TOKEN_TIME_BUCKETS = (
    .002, .004, .006, .008, .01, .015, .02, .025, .03, .04, .05, .06, .08, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 10,
)  # fmt: skip
_LATENCY_BUCKETS = (*_TTFT_BUCKETS, 320, 640, 1280)
_LENGTH_BUCKETS = (*(base * 10**power for power in range(6) for base in (1, 2, 5)), 1_000_000)

_LABELS = ("model_name",)


class Metrics:
    """The registry of one front. `heartbeat` gives the loop's latest."""

    def __init__(self, model_name: str, heartbeat: Callable[[], Heartbeat | None]) -> None:
        self._registry = CollectorRegistry()
        self._heartbeat = heartbeat
        ProcessCollector(registry=self._registry)
        self._registry.register(_LoopCollector(model_name, heartbeat))
        self._model_name = model_name
        self.ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token", _TTFT_BUCKETS)
        self.token_gap = self._histogram("inter_token_latency_seconds", "Between two tokens", _TOKEN_TIME_BUCKETS)
        self.tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean gap after the first token, per request", _TOKEN_TIME_BUCKETS
        )
        self.e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the last token", _LATENCY_BUCKETS)
        self.queue = self._histogram("request_queue_time_seconds", "TTFT's part before prefill", _LATENCY_BUCKETS)
        self.prefill = self._histogram("request_prefill_time_seconds", "TTFT's part in prefill", _LATENCY_BUCKETS)
        self.decode = self._histogram("request_decode_time_seconds", "From first to last token", _LATENCY_BUCKETS)
        self.prompt_length = self._histogram("request_prompt_tokens", "Tokens of a prompt", _LENGTH_BUCKETS)
        self.output_length = self._histogram("request_generation_tokens", "Tokens of an answer", _LENGTH_BUCKETS)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens prefilled")
        self.output_tokens = self._counter("generation_tokens", "Tokens generated")
        self.prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self.prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self._ended = self._family(Counter, "request_success", "Requests that ended, by reason", "finished_reason")
        self._refused = self._family(Counter, "requests_refused", "Requests that the engine refused", "reason")
        self._judged = self._family(
            Counter, "slo_requests", "Finished requests by verdict; the rate of `met` is the goodput", "verdict"
        )
        self._responses = self._family(Counter, "http_responses", "Responses by status", "status")
        # So that rates are defined from the start.
        for reason in FinishReason:
            self._ended.labels(model_name, reason.value)
        for refusal in RefusalReason:
            self._refused.labels(model_name, refusal.value)
        for verdict in ("met", "missed"):
            self._judged.labels(model_name, verdict)

    def begin(self, request: Request) -> RequestRecord:
        return RequestRecord(self, request)

    def response(self, status: int) -> None:
        self._responses.labels(self._model_name, str(status)).inc()

    def ended(self, reason: FinishReason) -> None:
        self._ended.labels(self._model_name, reason.value).inc()

    def refused(self, reason: RefusalReason) -> None:
        self._refused.labels(self._model_name, reason.value).inc()

    def judged(self, met: bool) -> None:
        self._judged.labels(self._model_name, "met" if met else "missed").inc()

    def slo(self) -> Slo | None:
        """The targets in force."""
        heartbeat = self._heartbeat()
        return None if heartbeat is None else heartbeat.slo

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def _family(self, kind: type[Counter], name: str, text: str, label: str) -> Counter:
        return kind(f"tidelane_{name}", text, (*_LABELS, label), registry=self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"tidelane_{name}", text, _LABELS, registry=self._registry).labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"tidelane_{name}", text, _LABELS, buckets=buckets, registry=self._registry)
        return family.labels(self._model_name)


class RequestRecord:
    """Takes one request's times and counts as they come, and judges it at its end."""

    def __init__(self, metrics: Metrics, request: Request) -> None:
        self._metrics = metrics
        self._request = request
        self._prefill_start_s: float | None = None
        self._first_s: float | None = None
        self._last_s = request.arrival_s
        self._longest_gap_s = 0.0
        self._output_tokens = 0
        self._heard = False
        self._over = False

    def tokens(self, message: Tokens) -> None:
        if not self._heard:
            self._heard = True
            self._begin(message)
        if not message.new:
            return
        if self._first_s is None:
            self._first_s = message.time_s
            self._metrics.ttft.observe(message.time_s - self._request.arrival_s)
        else:
            gap_s = message.time_s - self._last_s
            self._longest_gap_s = max(self._longest_gap_s, gap_s)
            self._metrics.token_gap.observe(gap_s)
        self._last_s = message.time_s
        self._output_tokens += len(message.new)
        self._metrics.output_tokens.inc(len(message.new))

    def refused(self, reason: RefusalReason) -> None:
        self._over = True
        self._metrics.refused(reason)

    def end(self, reason: FinishReason, timeline: Timeline | None = None) -> None:
        """The request ended; only the first call counts."""
        if self._over:
            return
        self._over = True
        self._metrics.ended(reason)
        if reason is FinishReason.ABORTED:
            return
        if reason is FinishReason.ERROR:
            self._metrics.judged(met=False)
            return
        timeline = timeline or self._timeline()
        if timeline is not None:
            self._finish(timeline)

    def _begin(self, message: Tokens) -> None:
        prompt = len(self._request.prompt)
        self._prefill_start_s = message.prefill_start_s
        self._metrics.prompt_tokens.inc(prompt)
        self._metrics.prefix_queries.inc(prompt)
        self._metrics.prefix_hits.inc(message.cached_tokens)

    def _timeline(self) -> Timeline | None:
        """Of a request that a stop string ended, which the loop does not see to its end."""
        if self._first_s is None or self._prefill_start_s is None:
            return None
        return Timeline(
            arrival_s=self._request.arrival_s,
            prefill_start_s=self._prefill_start_s,
            first_token_s=self._first_s,
            last_token_s=self._last_s,
            input_tokens=len(self._request.prompt),
            output_tokens=self._output_tokens,
            longest_gap_s=self._longest_gap_s,
        )

    def _finish(self, timeline: Timeline) -> None:
        metrics = self._metrics
        metrics.e2e.observe(timeline.last_token_s - timeline.arrival_s)
        metrics.queue.observe(timeline.queue_s)
        metrics.prefill.observe(timeline.prefill_s)
        metrics.decode.observe(timeline.last_token_s - timeline.first_token_s)
        metrics.prompt_length.observe(timeline.input_tokens)
        metrics.output_length.observe(timeline.output_tokens)
        if timeline.output_tokens > 1:
            metrics.tpot.observe(timeline.tpot_s)
        slo = metrics.slo()
        if slo is not None:
            metrics.judged(timeline.meets(slo.for_request(self._request.ttft_s, self._request.tpot_s)))


class _LoopCollector(Collector):
    """The loop's own numbers, read from its last heartbeat when Prometheus asks."""

    def __init__(self, model_name: str, heartbeat: Callable[[], Heartbeat | None]) -> None:
        self._model_name = model_name
        self._heartbeat = heartbeat

    @override
    def collect(self) -> Iterable[Metric]:
        beat = self._heartbeat()
        if beat is None:
            return
        used = beat.kv_blocks_total - beat.kv_blocks_free
        yield self._gauge("num_requests_running", "Requests being prefilled or decoded", beat.running)
        yield self._gauge("num_requests_waiting", "Requests that wait for prefill", beat.waiting)
        yield self._gauge(
            "kv_cache_usage_perc", "Part of the KV pool in use; 1 is all of it", used / max(1, beat.kv_blocks_total)
        )
        yield self._counter("num_preemptions", "Requests that lost their KV to others", beat.preemptions)
        yield from self._tiers(beat)
        yield self._gauges("kv_streams", "Requests larger than the pool, which stream from host memory", ("state",), {
            ("running",): beat.streams_running, ("waiting",): beat.streams_waiting,
        })  # fmt: skip
        yield self._counter("kv_streamed_bytes", "Bytes of KV read from host memory for them", beat.streamed_bytes)
        yield self._gauge("compute_units", "SMs or cores of the device", beat.compute_units)
        yield self._gauges("lane_compute_units", "SMs or cores of each lane, nominal; 0: not split", ("lane",), {
            ("decode",): beat.decode_units, ("prefill",): beat.prefill_units,
        })  # fmt: skip
        yield self._counter("lane_switches", "Times the border between the lanes moved", beat.lane_moves)
        yield self._counters(
            "lane_switches_to",
            "Moves of the border, by the units of decode and prefill after it",
            ("border",),
            {(border,): count for border, count in beat.lane_moves_to.items()},
        )
        yield self._counter("steps", "Decode steps and prefill slices", beat.steps)
        yield self._gauges("slo_target_seconds", "Latency targets in force", ("target",), {
            ("ttft",): beat.slo.ttft_s,
            ("ttft_per_1k_input_tokens",): beat.slo.ttft_per_1k_input_tokens_s,
            ("tpot",): beat.slo.tpot_s,
        })  # fmt: skip
        yield self._counters(
            "lane_busy_seconds",
            "Time by what the device did: realised lanes",
            ("kind",),
            {(kind,): seconds for kind, seconds in beat.busy_s.items()},
        )

    def _tiers(self, beat: Heartbeat) -> Iterable[Metric]:
        blocks: dict[tuple[str, ...], float] = {
            ("device", "used"): beat.kv_blocks_total - beat.kv_blocks_free,
            ("device", "idle"): beat.kv_blocks_idle,
            ("device", "free"): beat.kv_blocks_free - beat.kv_blocks_idle,
        }
        evictions: dict[tuple[str, ...], float] = {("device",): beat.kv_evictions}
        moved: dict[tuple[str, ...], Moved] = {}
        for name, tier in beat.kv_tiers.items():
            blocks |= {(name, "idle"): tier.total - tier.free - tier.pinned, (name, "free"): tier.free}
            if name == "host":
                blocks |= {(name, "used"): tier.pinned}
            evictions |= {(name,): tier.evictions}
            moved |= {(name, "store"): tier.stored, (name, "load"): tier.loaded}
        yield self._gauges("kv_tier_blocks", "KV blocks by tier and state", ("tier", "state"), blocks)
        yield self._counters("kv_evictions", "Idle KV blocks that made room for others", ("tier",), evictions)
        prefetched: tuple[tuple[str, str, Callable[[Ahead], float]], ...] = (
            ("kv_prefetched_blocks", "KV blocks brought to a tier ahead of their prompts", lambda ahead: ahead.blocks),
            ("kv_prefetched_useful_blocks", "Those of them that a prompt found", lambda ahead: ahead.useful),
            ("kv_prefetched_wasted_blocks", "Those of them that no prompt found", lambda ahead: ahead.wasted),
        )
        for figure, text, number in prefetched:
            by_tier: dict[tuple[str, ...], float] = {
                (name,): number(ahead) for name, ahead in beat.kv_prefetched.items()
            }
            yield self._counters(figure, text, ("tier",), by_tier)
        figures: tuple[tuple[str, str, Callable[[Moved], float]], ...] = (
            ("kv_moved_blocks", "KV blocks copied to a tier and from it", lambda way: way.blocks),
            ("kv_moved_bytes", "Bytes of KV copied to a tier and from it", lambda way: way.bytes),
            ("kv_moving_seconds", "Time during which KV was copied to a tier or from it", lambda way: way.seconds),
            ("kv_failed_moves", "Moves to a tier and from it that came to nothing", lambda way: way.failed_moves),
        )
        for figure, text, value in figures:
            values = {names: value(way) for names, way in moved.items()}
            yield self._counters(figure, text, ("tier", "way"), values)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._gauges(name, text, (), {(): value})

    def _gauges(
        self, name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]
    ) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"tidelane_{name}", text, labels=[*_LABELS, *labels])
        for label_values, value in values.items():
            family.add_metric([self._model_name, *label_values], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._counters(name, text, (), {(): value})

    def _counters(
        self, name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(f"tidelane_{name}", text, labels=[*_LABELS, *labels])
        for label_values, value in values.items():
            family.add_metric([self._model_name, *label_values], value)
        return family
