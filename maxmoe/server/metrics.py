"""What a server counts, for Prometheus: load, tokens, latencies, caches, failures.

Names are those that operators know from vLLM, under the prefix `maxmoe:`, so that their dashboards need one word
changed. Every series has the label `model_name`. Times are in seconds, shares between 0 and 1. Counters end in
`_total` where they are read.

`Metrics` holds two kinds. Requests and tokens are counted here, by the calls of the server. The engine counts for
itself, and `engine_state` passes on what it last said, so that nothing is counted twice; a restart of the engine shows
as a counter that begins anew, which Prometheus knows how to read.
"""

from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

_PREFIX = "maxmoe:"

# In seconds. A prompt of a million tokens takes minutes before its first token, an answer with much thinking an hour.
_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_REQUEST_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200)
_QUEUE_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

# Known before they happen, so that their series begin at 0 and a first occurrence counts as an increase.
_FINISH_REASONS = ("stop", "length", "tool_calls", "abort", "error")


class _State(NamedTuple):
    """What an engine last said of itself: requests, tokens and preemptions since it began, shares of its cache."""

    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    cache_fragmentation: float | None = None
    device_bytes: int | None = None


_GAUGES = {
    "num_requests_running": ("running", "Requests in the running batch."),
    "num_requests_waiting": ("waiting", "Requests that wait for a place in the batch."),
    "kv_cache_usage_perc": ("cache_usage", "Share of the cache in use; 1 is full."),
    "kv_cache_fragmentation_perc": (
        "cache_fragmentation",
        "Share of the slots in use that no request has set aside: what lies behind its longest answer.",
    ),
    "device_memory_used_bytes": ("device_bytes", "Memory in use on this process's devices, all of them together."),
}
_TOTALS = {
    "prefix_cache_queries": ("prefix_queries", "Prompt tokens that were looked for in the prefix cache."),
    "prefix_cache_hits": ("prefix_hits", "Prompt tokens that were found in the prefix cache."),
    "num_preemptions": ("preemptions", "Requests that lost their place in the batch to others and began again."),
}


class _Engine(Collector):
    """The engine's own numbers, as they are when somebody reads."""

    def __init__(self, model_name: str):
        self._model_name = model_name
        self.state = _State()

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        state = self.state  # replaced as a whole by another thread, never changed
        for table, family in ((_GAUGES, GaugeMetricFamily), (_TOTALS, CounterMetricFamily)):
            for name, (field, text) in table.items():
                value = getattr(state, field)
                if value is not None:
                    metric = family(_PREFIX + name, text, labels=["model_name"])
                    metric.add_metric([self._model_name], value)
                    yield metric


class Metrics:
    """The metrics of one server. Methods may be called from any thread; each costs microseconds.

    From requests, each with the labels of vLLM and those named here:
      requests (endpoint): Requests that were accepted.
      request_success (endpoint, finished_reason): Requests that ended, also by "abort" and "error".
      prompt_tokens, prompt_tokens_cached: Of ended requests; the cached ones were not computed again.
      generation_tokens (kind): Of ended requests; kind is "thinking" or "answer".
      time_to_first_token_seconds, request_queue_time_seconds, e2e_request_latency_seconds: From a request's arrival.
      request_time_per_output_token_seconds: A request's mean after its first token.
      inter_token_latency_seconds: Between two tokens of a request, as they come: its `_count` is the tokens of now.
      admission_rejections (reason), errors (kind), tool_call_parse_failures, budget_hits (tier): What went otherwise.
    From the engine: num_requests_running, num_requests_waiting, kv_cache_usage_perc, kv_cache_fragmentation_perc,
      device_memory_used_bytes, prefix_cache_queries, prefix_cache_hits, num_preemptions.
    And process_resident_memory_bytes with its like, of the server's own process, as every Prometheus client has them.
    """

    def __init__(self, model_name: str):
        """Starts at zero, with a registry of its own.

        Args:
          model_name: As requests name it; the label of every series.
        """
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)  # memory, processor time and open files of the server itself
        self._engine = _Engine(model_name)
        self._registry.register(self._engine)
        self._model_name = model_name

        self._requests = self._counter("requests", "Requests that were accepted.", "endpoint")
        self._success = self._counter(
            "request_success", "Requests that ended, by why they did.", "endpoint", "finished_reason"
        )
        self._prompt_tokens = self._of_model(self._counter("prompt_tokens", "Prompt tokens of ended requests."))
        self._prompt_tokens_cached = self._of_model(
            self._counter("prompt_tokens_cached", "Those of them that came from the prefix cache.")
        )
        generated = self._counter("generation_tokens", "Generated tokens of ended requests, by what they are.", "kind")
        self._thinking_tokens = self._of_model(generated, kind="thinking")
        self._answer_tokens = self._of_model(generated, kind="answer")
        self._queue_s = self._histogram(
            "request_queue_time_seconds", "From a request's arrival until it runs.", _QUEUE_S
        )
        self._first_token_s = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival until its first token.", _FIRST_TOKEN_S
        )
        self._token_s = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a request, observed as they come.", _TOKEN_S
        )
        self._mean_token_s = self._histogram(
            "request_time_per_output_token_seconds", "Per token after the first, a request's mean.", _TOKEN_S
        )
        self._request_s = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival until its end.", _REQUEST_S
        )
        self._rejections = self._counter(
            "admission_rejections", "Requests that were turned away before they waited.", "reason"
        )
        self._errors = self._counter("errors", "Requests that failed, by kind of error.", "kind")
        self._parse_failures = self._of_model(
            self._counter("tool_call_parse_failures", "Tool calls of the model that could not be read.")
        )
        self._budget_hits = self._counter("budget_hits", "Thinking that was ended by its budget, by tier.", "tier")

    def request_started(self, endpoint: str) -> None:
        """Counts a request that is accepted.

        Args:
          endpoint: Its path, one of the server's own and nothing that a client can choose.
        """
        for reason in _FINISH_REASONS:
            self._of_model(self._success, endpoint=endpoint, finished_reason=reason)
        self._of_model(self._requests, endpoint=endpoint).inc()

    def request_ended(
        self,
        endpoint: str,
        status: str,
        queue_s: float | None,
        ttft_s: float | None,
        prompt_tokens: int,
        cached_tokens: int,
        thinking_tokens: int,
        answer_tokens: int,
        e2e_s: float,
    ) -> None:
        """Counts an accepted request that is over.

        Args:
          endpoint: As in `request_started`.
          status: Its finish reason; "abort" where the client went away, "error" where it failed.
          queue_s: How long it waited; None where it never ran.
          ttft_s: From its arrival to its first token; None without one.
          cached_tokens: Those of prompt_tokens that the prefix cache had.
          e2e_s: From its arrival to now.
        """
        self._of_model(self._success, endpoint=endpoint, finished_reason=status).inc()
        self._prompt_tokens.inc(prompt_tokens)
        self._prompt_tokens_cached.inc(cached_tokens)
        self._thinking_tokens.inc(thinking_tokens)
        self._answer_tokens.inc(answer_tokens)
        self._request_s.observe(e2e_s)
        if queue_s is not None:
            self._queue_s.observe(queue_s)
        if ttft_s is not None:
            self._first_token_s.observe(ttft_s)
            if (num_following := thinking_tokens + answer_tokens - 1) > 0:
                self._mean_token_s.observe((e2e_s - ttft_s) / num_following)

    def token_time(self, seconds: float) -> None:
        """Counts a token that came so long after the one before it, in the same request."""
        self._token_s.observe(seconds)

    def admission_rejection(self, reason: str) -> None:
        """Counts a request that was turned away, such as for a full queue."""
        self._of_model(self._rejections, reason=reason).inc()

    def error(self, kind: str) -> None:
        """Counts a failure; `kind` is the type that the error's body names."""
        self._of_model(self._errors, kind=kind).inc()

    def tool_call_parse_failure(self) -> None:
        """Counts a tool call of the model that could not be read."""
        self._parse_failures.inc()

    def budget_hit(self, tier: str) -> None:
        """Counts thinking that was ended by its budget; `tier` is the effort, or what else set the budget."""
        self._of_model(self._budget_hits, tier=tier).inc()

    def engine_state(
        self,
        running: int,
        waiting: int,
        cache_usage: float,
        prefix_queries: int,
        prefix_hits: int,
        preemptions: int = 0,
        cache_fragmentation: float | None = None,
        device_bytes: int | None = None,
    ) -> None:
        """Takes what the engine says of itself.

        Args:
          running, waiting: Requests.
          cache_usage, cache_fragmentation: Shares of the cache, 0 to 1; None where the engine does not say.
          prefix_queries, prefix_hits: Tokens, since the engine began.
          preemptions: Requests, since the engine began.
          device_bytes: In use on the devices; None where they do not say.
        """
        shares = cache_usage, prefix_queries, prefix_hits, preemptions, cache_fragmentation
        self._engine.state = _State(running, waiting, *shares, device_bytes)

    def render(self) -> tuple[bytes, str]:
        """What Prometheus reads, and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, text, ("model_name", *labels), registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(_PREFIX + name, text, ("model_name",), registry=self._registry, buckets=buckets)
        return histogram.labels(self._model_name)

    def _of_model(self, counter: Counter, **labels: str) -> Counter:
        return counter.labels(model_name=self._model_name, **labels)
