"""How long an engine takes for a token when so many sequences decode together.

All requests are submitted at once, greedy and with random prompts of one length, and none ends
before its last token. The time of a step in which every request gets a token that is not its first
is an inter-token latency; a step's time is the host's, from the call to the tokens in its hands.
"""

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quantforge.errors import UsageError
from quantforge.runtime.engine import Engine
from quantforge.runtime.request import SamplingParams

WARM_UP_TOKENS = 4
PROFILED_STEPS = 5
LISTED_KERNELS = 25


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """`batch` requests at once, of `input_len` prompt tokens and `output_len` new ones each."""

    batch: int
    input_len: int
    output_len: int

    def __str__(self) -> str:
        return f"{self.input_len} in, {self.output_len} out"


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """What was measured; times are medians in milliseconds."""

    itl_ms: float
    """From a token to the next, of every request."""
    itl_p99_ms: float
    out_tok_s: float
    """Tokens of all requests a second while all decode."""
    ttft_ms: float
    """From the submission of all requests to a request's first token."""
    num_steps: int
    """Steps that `itl_ms` is the median of."""


def measure_latency(engine: Engine, workload: Workload, seed: int = 0) -> Latency:
    """Times `workload`, after a short run of it that compiles and records what is needed.

    Raises `UsageError` if the engine cannot hold all requests at a time.
    """
    run_workload(engine, workload, seed, min(WARM_UP_TOKENS, workload.output_len))
    steps, first_tokens = run_workload(engine, workload, seed, workload.output_len)
    if not steps:
        raise UsageError(
            f"no step had all {workload.batch} requests in it; use a longer output than "
            f"{workload.output_len} tokens or a larger token budget"
        )
    median = statistics.median(steps)
    return Latency(
        itl_ms=1000 * median,
        itl_p99_ms=1000 * sorted(steps)[-(-99 * len(steps) // 100) - 1],
        out_tok_s=workload.batch / median,
        ttft_ms=1000 * statistics.median(first_tokens),
        num_steps=len(steps),
    )


def run_workload(
    engine: Engine, workload: Workload, seed: int, output_len: int
) -> tuple[list[float], list[float]]:
    """Seconds of each step in which all requests went on, and to each request's first token."""
    preempted = engine.scheduler.num_preemptions
    started: set[str] = set()
    steps, first_tokens = [], []
    submitted = time.perf_counter()
    try:
        _submit(engine, workload, seed, output_len)
        while engine.has_work():
            begin = time.perf_counter()
            outputs = engine.step()
            end = time.perf_counter()
            failed = next((output.error for output in outputs if output.error), None)
            if failed is not None:
                raise UsageError(f"a request failed: {failed}")
            if len(outputs) == workload.batch == len(started):
                steps.append(end - begin)
            new = {output.request_id for output in outputs} - started
            first_tokens += [end - submitted] * len(new)
            started |= new
    finally:
        _abort(engine, workload)
    if engine.scheduler.num_preemptions > preempted:
        raise UsageError(
            f"the KV cache cannot hold {workload.batch} requests of "
            f"{workload.input_len + workload.output_len} tokens at a time"
        )
    return steps, first_tokens


def profile_steps(engine: Engine, workload: Workload, seed: int = 0) -> Mapping[str, Any]:
    """What the device does in a step in which all requests decode, by torch's profiler.

    ``device_us`` is the sum over its kernels and copies, ``kernels`` the longest with their
    microseconds and launches a step.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if engine.device.type == "cuda":
        activities = [torch.profiler.ProfilerActivity.CUDA]
    try:
        _submit(engine, workload, seed, workload.output_len)
        while engine.has_work() and len(engine.step()) < workload.batch:
            pass
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(PROFILED_STEPS):
                engine.step()
    finally:
        _abort(engine, workload)
    totals = []
    for event in profiler.key_averages():
        on_device = event.self_device_time_total if engine.device.type == "cuda" else None
        us = (event.self_cpu_time_total if on_device is None else on_device) / PROFILED_STEPS
        totals.append((us, event.key, event.count / PROFILED_STEPS))
    totals.sort(reverse=True)
    return {
        "device_us": round(sum(us for us, _, _ in totals), 1),
        "kernels": [
            {"name": name[:100], "us": round(us, 2), "launches": launches}
            for us, name, launches in totals[:LISTED_KERNELS]
        ],
    }


def _submit(engine: Engine, workload: Workload, seed: int, output_len: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (workload.batch, workload.input_len)
    prompts = torch.randint(0, engine.vocab_size, shape, generator=generator).tolist()
    params = SamplingParams(max_tokens=output_len, temperature=0, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add_request(f"{index}", prompt, params)


def _abort(engine: Engine, workload: Workload) -> None:
    for index in range(workload.batch):
        engine.abort(f"{index}")
