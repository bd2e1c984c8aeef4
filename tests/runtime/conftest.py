"""Engines over tiny models, and transformers' results for the same prompts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from quantforge.runtime.config import EngineConfig
from quantforge.runtime.engine import Engine
from quantforge.runtime.request import SamplingParams

LENGTHS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 40)


@pytest.fixture
def make_engine() -> Callable[..., Engine]:
    """``make_engine(folder, **config)``: an engine on the CPU in float32."""

    def make(folder: Path, **config: Any) -> Engine:
        settings = {"device": "cpu", "dtype": "float32", "page_size": 4, **config}
        return Engine.from_folder(folder, EngineConfig(**settings))

    return make


@pytest.fixture
def prompts() -> list[list[int]]:
    """Ten prompts of different lengths, ids from 3 on (0 to 2 are special)."""
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(3, 512, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture
def greedy() -> SamplingParams:
    return SamplingParams(max_tokens=12, temperature=0)


@pytest.fixture
def generate_alone() -> Callable[..., list[tuple[int, ...]]]:
    """``generate_alone(model, prompts, max_tokens)``: new tokens of transformers' generate."""

    def generate(
        model: Any, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> list[tuple[int, ...]]:
        found = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            with torch.no_grad():
                out = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=max_tokens,
                    pad_token_id=0,
                )
            found.append(tuple(out[0, len(prompt) :].tolist()))
        return found

    return generate
