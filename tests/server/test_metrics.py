"""The metrics of a server, read as Prometheus reads them."""

import threading
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from maxmoe.server.metrics import Metrics

_CHAT = "/v1/chat/completions"


@pytest.fixture
def metrics():
    return Metrics("m")


def _samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Values by name and the values of labels, without the model's name and without times of creation."""
    text, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith("process_"):  # the server's own, whatever it serves
                assert not labels and sample.value >= 0
                continue
            assert labels.pop("model_name") == "m", sample
            if not sample.name.endswith("_created"):
                found[(sample.name, *(labels[key] for key in sorted(labels)))] = sample.value
    return found


def _end(metrics: Metrics, **changes) -> None:
    given = {"status": "stop", "queue_s": 0.5, "ttft_s": 2.0, "prompt_tokens": 100, "cached_tokens": 64}
    given |= {"thinking_tokens": 7, "answer_tokens": 4, "e2e_s": 7.0} | changes
    metrics.request_ended(_CHAT, **given)


def test_request_is_counted_at_its_start_and_its_end(metrics):
    metrics.request_started(_CHAT)
    samples = _samples(metrics)
    assert samples["maxmoe:requests_total", _CHAT] == 1
    assert samples["maxmoe:request_success_total", _CHAT, "stop"] == 0  # there before it happens
    _end(metrics)
    samples = _samples(metrics)
    assert samples["maxmoe:request_success_total", _CHAT, "stop"] == 1
    assert samples["maxmoe:prompt_tokens_total",] == 100
    assert samples["maxmoe:prompt_tokens_cached_total",] == 64
    assert samples["maxmoe:generation_tokens_total", "thinking"] == 7
    assert samples["maxmoe:generation_tokens_total", "answer"] == 4
    assert samples["maxmoe:request_queue_time_seconds_sum",] == 0.5
    assert samples["maxmoe:time_to_first_token_seconds_sum",] == 2.0
    assert samples["maxmoe:e2e_request_latency_seconds_sum",] == 7.0
    assert samples["maxmoe:request_time_per_output_token_seconds_sum",] == 0.5  # 5 s for the 10 after the first


def test_request_that_made_no_token_or_one_has_no_time_per_token(metrics):
    _end(metrics, status="abort", queue_s=None, ttft_s=None, thinking_tokens=0, answer_tokens=0)
    _end(metrics, status="length", thinking_tokens=0, answer_tokens=1)
    samples = _samples(metrics)
    assert samples["maxmoe:request_success_total", _CHAT, "abort"] == 1
    assert samples["maxmoe:request_success_total", _CHAT, "length"] == 1
    counts = ("request_queue_time", "time_to_first_token", "request_time_per_output_token", "e2e_request_latency")
    assert [samples[f"maxmoe:{name}_seconds_count",] for name in counts] == [1, 1, 0, 2]


def test_token_times_fall_into_buckets(metrics):
    for seconds in (0.004, 0.03, 9.0):
        metrics.token_time(seconds)
    samples = _samples(metrics)
    name = "maxmoe:inter_token_latency_seconds_bucket"
    assert [samples[name, edge] for edge in ("0.002", "0.005", "0.03", "2.5", "+Inf")] == [0, 1, 2, 2, 3]


def test_what_goes_otherwise_is_counted_by_kind(metrics):
    metrics.error("invalid_request_error")
    metrics.error("invalid_request_error")
    metrics.admission_rejection("queue_full")
    metrics.tool_call_parse_failure()
    metrics.budget_hit("low")
    samples = _samples(metrics)
    assert samples["maxmoe:errors_total", "invalid_request_error"] == 2
    assert samples["maxmoe:admission_rejections_total", "queue_full"] == 1
    assert samples["maxmoe:tool_call_parse_failures_total",] == 1
    assert samples["maxmoe:budget_hits_total", "low"] == 1


def test_engine_state_is_shown_as_it_was_last(metrics):
    metrics.engine_state(3, 5, 0.25, 1000, 600)
    assert ("maxmoe:kv_cache_fragmentation_perc",) not in _samples(metrics), "nothing is said of what is not known"
    metrics.engine_state(2, 1, 0.5, 1500, 900, preemptions=4, cache_fragmentation=0.125, device_bytes=2**33)
    samples = _samples(metrics)
    assert samples["maxmoe:device_memory_used_bytes",] == 2**33
    assert samples["maxmoe:num_requests_running",] == 2
    assert samples["maxmoe:num_requests_waiting",] == 1
    assert samples["maxmoe:kv_cache_usage_perc",] == 0.5
    assert samples["maxmoe:kv_cache_fragmentation_perc",] == 0.125
    assert samples["maxmoe:prefix_cache_queries_total",] == 1500
    assert samples["maxmoe:prefix_cache_hits_total",] == 900
    assert samples["maxmoe:num_preemptions_total",] == 4


def test_every_metric_says_what_it_is_and_its_class_names_it(metrics):
    metrics.engine_state(0, 0, 0.0, 0, 0, cache_fragmentation=0.0, device_bytes=0)
    families = list(text_string_to_metric_families(metrics.render()[0].decode()))
    families = [family for family in families if not family.name.startswith("process_")]
    assert len(families) > 20
    for family in families:
        assert family.name.startswith("maxmoe:") and family.documentation.endswith("."), family
        name = family.name.removeprefix("maxmoe:").removesuffix("_created")
        assert name in Metrics.__doc__, name


def test_servers_do_not_share_their_counts(metrics):
    metrics.token_time(1.0)
    assert b'inter_token_latency_seconds_count{model_name="n"} 0.0' in Metrics("n").render()[0]


def test_counts_from_several_threads_add_up(metrics):
    def count():
        for _ in range(500):
            metrics.token_time(0.01)
            metrics.error("e")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    samples = _samples(metrics)
    assert samples["maxmoe:errors_total", "e"] == samples["maxmoe:inter_token_latency_seconds_count",] == 2000


def test_token_time_costs_little(metrics):
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(200):
            metrics.token_time(0.01)
        best = min(best, (time.perf_counter() - began) / 200)
    assert best < 50e-6  # measured 1 us; a server may add 200 us to a token, and other work shares the test machine


def test_the_servers_own_memory_is_told(metrics):
    text, _ = metrics.render()
    values = dict(line.split() for line in text.decode().splitlines() if line.startswith("process_"))
    assert float(values["process_resident_memory_bytes"]) > 2**20
