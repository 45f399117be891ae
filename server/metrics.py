"""Prometheus metrics: requests as the server saw them, pages and steps as the engine counts them at the time of the scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from pie_server.metrics_help import help_of

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}


class _EngineCollector:
    """Reads the engine's plain counters when scraped; a name that ends in `_total` is a counter, others are gauges."""

    def __init__(self, stats: Callable[[], Mapping[str, float]]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        for name, value in sorted(self._stats().items()):
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(f"pie_{name.removesuffix('_total')}", help_of(name))
            family.add_metric([], float(value))
            yield family


class Metrics:
    """One registry a server, so that several servers in one process (tests) do not mix."""

    def __init__(self, stats: Callable[[], Mapping[str, float]]) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter("pie_requests", "HTTP requests", ["method", "route", "status"], registry=self.registry)
        self._seconds = Histogram(
            "pie_request_seconds", "Seconds from request to last byte", ["route"], buckets=_SECONDS, registry=self.registry
        )
        self._tokens = Counter("pie_api_tokens", "Tokens of finished API requests", ["kind"], registry=self.registry)
        self.active = Gauge("pie_requests_active", "Inference requests running now", registry=self.registry)
        self.registry.register(_EngineCollector(stats))

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one finished request. `route` is the route's pattern, never the raw path."""
        self._requests.labels(method if method in _METHODS else "other", route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def usage(self, usage: Mapping[str, int]) -> None:
        """Count the tokens of one finished API request."""
        for kind in ("prompt", "completion"):
            self._tokens.labels(kind).inc(usage.get(f"{kind}_tokens", 0))

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)
