"""Parameters check themselves."""

from typing import Any

import pytest

from quantforge.errors import UsageError
from quantforge.runtime.config import EngineConfig
from quantforge.runtime.request import Request, SamplingParams, check_prompt


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("seed", 2**63),
        ("stop", "END"),
        ("stop", ("",)),
        ("logprobs", -1),
        ("logprobs", 21),
    ],
)
def test_impossible_sampling_parameters_are_refused(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("page_size", 0),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("max_model_len", 1),
        ("kv_cache_tokens", 15),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.1),
    ],
)
def test_impossible_engine_settings_are_refused(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=field):
        EngineConfig(**{field: value})


def test_a_prompt_must_hold_tokens_of_the_vocabulary() -> None:
    check_prompt([0, 9], 10)
    with pytest.raises(UsageError, match="no tokens"):
        check_prompt([], 10)
    with pytest.raises(UsageError, match=r"10 at position 1 of the prompt is not in 0\.\.9"):
        check_prompt([3, 10], 10)
    with pytest.raises(UsageError, match="-1 at position 0"):
        check_prompt([-1], 10)


def test_the_last_token_never_enters_the_cache() -> None:
    def cached(num_prompt: int, max_tokens: int) -> int:
        return Request(
            request_id="a",
            token_ids=[0] * num_prompt,
            num_prompt=num_prompt,
            params=SamplingParams(),
            max_tokens=max_tokens,
            seed=0,
            arrival=0,
        ).max_cached_tokens

    assert cached(5, 1) == 5
    assert cached(5, 3) == 7
    assert cached(5, 0) == 5
