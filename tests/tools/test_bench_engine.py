"""The benchmark of serving: its workloads, its figures, and that an engine and a server are driven alike."""

import contextlib
import json
import math
import threading
import types

import httpx
import numpy as np
import pytest
import uvicorn
from absl import app
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from maxmoe.inference.serving_loop import ServingMetrics
from tools import bench_engine, workload
from tools.workload import Job, Outcome, Served


def test_workloads_are_random_by_their_seed_alone_and_survive_a_file(tmp_path):
    jobs = workload.make_jobs(np.random.default_rng(3), 40, 5.0, (8, 20), (4, 6), shared_tokens=3)
    assert jobs == workload.make_jobs(np.random.default_rng(3), 40, 5.0, (8, 20), (4, 6), shared_tokens=3)
    assert all(job.prompt[:3] == [0, 1, 2] and 11 <= len(job.prompt) <= 23 for job in jobs)
    assert {job.max_tokens for job in jobs} == {4, 5, 6}
    times = [job.at_s for job in jobs]
    assert times == sorted(times) and 4 < times[-1] < 16  # 40 requests at 5 a second
    assert {job.at_s for job in workload.make_jobs(np.random.default_rng(3), 4, math.inf, (1, 1), (1, 1))} == {0.0}
    workload.write_jobs(tmp_path / "jobs", jobs)
    assert workload.read_jobs(tmp_path / "jobs") == jobs
    (tmp_path / "bad").write_text('{"at_s": 0, "prompt": [1], "max_tokens": 2}\n{"at": 0}\n')
    with pytest.raises(ValueError, match="line 2: expected at_s, prompt and max_tokens"):
        workload.read_jobs(tmp_path / "bad")


def test_figures():
    outcome = Outcome([Served(1.0, 4.0, 4, 8), Served(3.0, 3.0, 1)], elapsed_s=10.0, host_share=0.1)
    assert outcome.figures([Job(0.0, [1] * 10, 4), Job(0.0, [1] * 10, 1)]) == {
        "tokens_per_s": 0.5,
        "first_token_s": 2.0,
        "first_token_90_s": 2.8,
        "per_token_s": 1.0,
        "per_token_90_s": 1.0,
        "cached": 0.4,
        "host_share": 0.1,
    }


class _Engine:
    """Says one token of each request at a step."""

    def __init__(self):
        self.metrics, self.running, self.most = ServingMetrics(), [], 0

    @property
    def has_work(self):
        return bool(self.running)

    def submit(self, prompt, params):
        request = types.SimpleNamespace(steps=[], num_cached=2, first_token_s=None, left=params.max_tokens)
        self.running.append(request)
        return request

    def step(self):
        self.most = max(self.most, len(self.running))
        for request in self.running:
            request.steps.append(7)
            request.left -= 1
            request.ended_s = workload.time.perf_counter()
            request.first_token_s = request.first_token_s or request.ended_s
        self.running = [request for request in self.running if request.left]


JOBS = [Job(0.0, [1, 2, 3], 3), Job(0.0, [4], 2), Job(0.05, [5, 6], 4)]


def test_an_engine_is_driven_by_the_clock():
    engine = _Engine()
    outcome = workload.drive_engine(engine, JOBS)
    assert [served.num_tokens for served in outcome.served] == [3, 2, 4] and engine.most == 2
    assert all(0 <= served.first_s <= served.last_s for served in outcome.served)
    assert outcome.elapsed_s >= 0.05 and outcome.host_share == 1.0  # it never waits


@contextlib.contextmanager
def _server(endpoint):
    config = uvicorn.Config(
        Starlette(routes=[Route("/v1/completions", endpoint, methods=["POST"])]), port=0, log_level="error"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        pass
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()


def test_a_server_is_sent_the_same_requests():
    asked = []

    async def complete(request):
        body = await request.json()
        asked.append(body | {"key": request.headers.get("authorization")})
        count = body["max_tokens"]
        events = [{"choices": [{"text": "a"}]}] * count
        events.append({"choices": [], "usage": {"completion_tokens": count, "prompt_tokens_details": None}})
        lines = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"]
        return StreamingResponse(iter(lines), media_type="text/event-stream")

    with _server(complete) as url:
        outcome = workload.drive_server(url, JOBS, "m", "secret")
    assert [served.num_tokens for served in outcome.served] == [3, 2, 4]
    assert sorted(body["prompt"] for body in asked) == sorted(job.prompt for job in JOBS)
    assert {(body["temperature"], body["model"], body["key"]) for body in asked} == {(0, "m", "Bearer secret")}
    assert all(0 < served.first_s <= served.last_s for served in outcome.served) and math.isnan(outcome.host_share)


def test_what_a_server_refuses_is_told():
    async def refuse(request):
        return JSONResponse({"error": {"message": "no such model"}}, status_code=404)

    with _server(refuse) as url, pytest.raises(httpx.HTTPStatusError, match="no such model"):
        workload.drive_server(url, JOBS[:1], "m")


def test_results_are_written(tmp_path):
    row = Outcome([Served(1.0, 4.0, 4, 8)], 10.0).figures([Job(0.0, [1] * 10, 4)])
    bench_engine._write(tmp_path, {("8 slots", "32:32", "4"): row, ("8 slots", "32:32", "16"): row})
    records = json.loads((tmp_path / "results.json").read_text())
    assert records[1]["rate"] == "16" and records[0]["tokens_per_s"] == 0.4 and records[0]["host_share"] is None
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_mixes_are_read():
    assert bench_engine.parse_mix("8-200:32") == ((8, 200), (32, 32))
    for text in ("8", "8:0", "9-8:1", "a:b"):
        with pytest.raises(app.UsageError, match="--mix="):
            bench_engine.parse_mix(text)
