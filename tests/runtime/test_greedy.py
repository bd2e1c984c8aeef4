"""Greedy generation equals transformers' generate token for token, however it is scheduled."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantforge.runtime.engine import Engine
from quantforge.runtime.request import SamplingParams

ARCHITECTURES = ["llama", "mistral", "qwen2", "qwen3"]

SCHEDULES: dict[str, dict[str, int]] = {
    "one mixed batch": {},
    "chunked prefill": {"max_num_batched_tokens": 7},
    "a token a step": {"max_num_batched_tokens": 1},
    "few sequences": {"max_num_seqs": 3},
    "one page a token": {"page_size": 1},
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_prompts_alone_equal_transformers(
    arch: str,
    tiny_model: Callable[..., Path],
    reference_model: Callable[..., Any],
    generate_alone: Callable[..., Any],
    make_engine: Callable[..., Engine],
    prompts: list[list[int]],
    greedy: SamplingParams,
) -> None:
    folder = tiny_model(arch)
    engine = make_engine(folder)
    ours = [engine.generate([prompt], greedy)[0].token_ids for prompt in prompts]
    assert ours == generate_alone(reference_model(folder), prompts, 12)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_prompts_together_equal_transformers(
    schedule: dict[str, int],
    tiny_model: Callable[..., Path],
    reference_model: Callable[..., Any],
    generate_alone: Callable[..., Any],
    make_engine: Callable[..., Engine],
    prompts: list[list[int]],
    greedy: SamplingParams,
) -> None:
    folder = tiny_model()
    engine = make_engine(folder, **schedule)
    ours = [completion.token_ids for completion in engine.generate(prompts, greedy)]
    assert ours == generate_alone(reference_model(folder), prompts, 12)
    assert engine.scheduler.num_preemptions == 0


def test_preempted_requests_equal_transformers(
    tiny_model: Callable[..., Path],
    reference_model: Callable[..., Any],
    generate_alone: Callable[..., Any],
    make_engine: Callable[..., Engine],
    prompts: list[list[int]],
) -> None:
    folder = tiny_model()
    engine = make_engine(folder, kv_cache_tokens=88, max_num_batched_tokens=30)
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    ours = [completion.token_ids for completion in engine.generate(prompts, params)]
    assert engine.scheduler.num_preemptions > 3
    engine.check()
    model = reference_model(folder)
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    assert ours == generate_alone(model, prompts, 30)


@pytest.mark.parametrize("budget", [2048, 5])
def test_a_sliding_window_equals_transformers(
    budget: int,
    tiny_model: Callable[..., Path],
    reference_model: Callable[..., Any],
    generate_alone: Callable[..., Any],
    make_engine: Callable[..., Engine],
    prompts: list[list[int]],
    greedy: SamplingParams,
) -> None:
    folder = tiny_model("mistral", sliding_window=6)
    engine = make_engine(folder, max_num_batched_tokens=budget)
    ours = [completion.token_ids for completion in engine.generate(prompts, greedy)]
    assert ours == generate_alone(reference_model(folder), prompts, 12)


def test_requests_that_arrive_while_others_run_equal_transformers(
    tiny_model: Callable[..., Path],
    reference_model: Callable[..., Any],
    generate_alone: Callable[..., Any],
    make_engine: Callable[..., Engine],
    prompts: list[list[int]],
    greedy: SamplingParams,
) -> None:
    folder = tiny_model()
    engine = make_engine(folder, max_num_batched_tokens=9)
    tokens: dict[str, tuple[int, ...]] = {}
    waiting = list(enumerate(prompts))
    while waiting or engine.has_work():
        if waiting:
            index, prompt = waiting.pop()
            engine.add_request(f"{index}", prompt, greedy)
        for output in engine.step():
            tokens[output.request_id] = tokens.get(output.request_id, ()) + output.token_ids
        engine.check()
    expected = generate_alone(reference_model(folder), prompts, 12)
    assert [tokens[f"{index}"] for index in range(len(prompts))] == expected
