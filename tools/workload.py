"""A workload: which prompts come when, and how an engine or any OpenAI-compatible server fares under it.

As a file it is JSON lines, {"at_s": seconds from the start, "prompt": [token ids], "max_tokens": N}, so that the very
same requests can be sent to several servers.
"""

import asyncio
import dataclasses
import json
import math
import time
from pathlib import Path

import httpx
import numpy as np

import maxmoe as mm


@dataclasses.dataclass(frozen=True)
class Job:
    """One request: when it comes, and what it asks."""

    at_s: float
    prompt: list[int]
    max_tokens: int


@dataclasses.dataclass
class Served:
    """What became of one job: seconds from its due time, and tokens.

    Attributes:
      first_s: Until its first token.
      last_s: Until its last one.
      num_tokens: Of the answer, what ended it included.
      num_cached: Of the prompt, found in a prefix cache.
    """

    first_s: float
    last_s: float
    num_tokens: int
    num_cached: int = 0


@dataclasses.dataclass
class Outcome:
    """What became of a workload.

    Attributes:
      elapsed_s: From the first due time to the last token.
      host_share: Of the time of steps, what the host did not spend waiting for the device; NaN for a server.
    """

    served: list[Served]
    elapsed_s: float
    host_share: float = math.nan

    def figures(self, jobs: list[Job]) -> dict[str, float]:
        """The figures of a table: rates per second, seconds, shares."""
        first = [served.first_s for served in self.served]
        later = [(s.last_s - s.first_s) / (s.num_tokens - 1) for s in self.served if s.num_tokens > 1] or [math.nan]
        return {
            "tokens_per_s": sum(served.num_tokens for served in self.served) / self.elapsed_s,
            "first_token_s": float(np.percentile(first, 50)),
            "first_token_90_s": float(np.percentile(first, 90)),
            "per_token_s": float(np.percentile(later, 50)),
            "per_token_90_s": float(np.percentile(later, 90)),
            "cached": sum(s.num_cached for s in self.served) / sum(len(job.prompt) for job in jobs),
            "host_share": self.host_share,
        }


def make_jobs(
    rng: np.random.Generator,
    count: int,
    rate: float,
    prompt_range: tuple[int, int],
    answer_range: tuple[int, int],
    shared_tokens: int = 0,
) -> list[Job]:
    """Random prompts at random times of a mean rate per second; `math.inf` for all at once."""
    shared = (np.arange(shared_tokens) % 251).tolist()
    waits = np.zeros(count) if math.isinf(rate) else rng.exponential(1 / rate, count)
    return [
        Job(
            at_s=float(at_s),
            prompt=[*shared, *rng.integers(0, 256, rng.integers(*prompt_range, endpoint=True)).tolist()],
            max_tokens=int(rng.integers(*answer_range, endpoint=True)),
        )
        for at_s in np.cumsum(waits)
    ]


def read_jobs(file: Path) -> list[Job]:
    """Reads a workload. ValueError names the line that is wrong."""
    jobs = []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        try:
            jobs.append(Job(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{file}, line {number}: expected at_s, prompt and max_tokens; {error}") from error
    return jobs


def write_jobs(file: Path, jobs: list[Job]) -> None:
    """Writes a workload."""
    file.write_text("".join(json.dumps(dataclasses.asdict(job)) + "\n" for job in jobs))


def drive_engine(engine: mm.Engine, jobs: list[Job]) -> Outcome:
    """Serves a workload in this process, all greedy."""
    begin, waited, stepped = time.perf_counter(), engine.metrics.waited_s, 0.0
    requests: list[mm.Request] = []
    while len(requests) < len(jobs) or engine.has_work:
        while len(requests) < len(jobs) and begin + jobs[len(requests)].at_s <= time.perf_counter():
            job = jobs[len(requests)]
            requests.append(engine.submit(job.prompt, mm.SamplingParams(temperature=0.0, max_tokens=job.max_tokens)))
        if engine.has_work:
            step_begin = time.perf_counter()
            engine.step()
            stepped += time.perf_counter() - step_begin
        else:
            time.sleep(max(begin + jobs[len(requests)].at_s - time.perf_counter(), 0))
    served = []
    for job, request in zip(jobs, requests, strict=True):
        due = begin + job.at_s  # not from when the loop had time to submit it
        served.append(
            Served(request.first_token_s - due, request.ended_s - due, len(request.steps), request.num_cached)
        )
    share = 1 - (engine.metrics.waited_s - waited) / stepped
    return Outcome(served, time.perf_counter() - begin, share)


def drive_server(url: str, jobs: list[Job], model: str, key: str = "") -> Outcome:
    """Sends a workload to `url`/v1/completions as streams, all greedy; httpx.HTTPError for an answer that fails."""
    return asyncio.run(_drive_server(url.rstrip("/"), jobs, model, {"Authorization": f"Bearer {key}"} if key else {}))


async def _drive_server(url, jobs, model, headers):
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits, headers=headers) as client:
        begin = time.perf_counter()
        served = await asyncio.gather(*(_send(client, url, begin + job.at_s, job, model) for job in jobs))
        return Outcome(list(served), time.perf_counter() - begin)


async def _send(client, url, due, job, model):
    await asyncio.sleep(max(due - time.perf_counter(), 0))
    body = {"model": model, "prompt": job.prompt, "max_tokens": job.max_tokens, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    first, usage = math.nan, {}
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        if response.is_error:
            await response.aread()
            raise httpx.HTTPStatusError(response.text, request=response.request, response=response)
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[len("data: ") :])
            usage = event.get("usage") or usage
            if math.isnan(first) and event.get("choices"):
                first = time.perf_counter() - due
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Served(first, time.perf_counter() - due, usage["completion_tokens"], cached)
