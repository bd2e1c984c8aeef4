"""Scores of whole texts equal a plain transformers forward."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantforge.errors import UsageError
from quantforge.runtime import runner
from quantforge.runtime.engine import Engine
from quantforge.runtime.request import SamplingParams


def scores(engine: Engine, windows: list[list[int]]) -> list[torch.Tensor]:
    """Logits of each window, put together from the calls in their order."""
    parts: list[list[torch.Tensor]] = [[] for _ in windows]

    def consume(window: int, start: int, logits: torch.Tensor) -> None:
        assert start == sum(len(part) for part in parts[window])
        assert logits.dtype == torch.float32
        parts[window].append(logits.clone())

    engine.score(windows, consume)
    return [torch.cat(part) for part in parts]


def reference_scores(model: Any, windows: list[list[int]]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(torch.tensor([window])).logits[0] for window in windows]


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("budget", [2048, 24, 7])
def test_scores_equal_a_plain_forward(
    arch: str,
    budget: int,
    tiny_model: Callable[..., Path],
    reference_model: Callable[..., Any],
    make_engine: Callable[..., Engine],
    prompts: list[list[int]],
) -> None:
    folder = tiny_model(arch)
    ours = scores(make_engine(folder, max_num_batched_tokens=budget), prompts)
    for own, expected in zip(ours, reference_scores(reference_model(folder), prompts), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)


def test_scores_come_in_blocks_of_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: Callable[..., Path],
    reference_model: Callable[..., Any],
    make_engine: Callable[..., Engine],
) -> None:
    monkeypatch.setitem(runner.MAX_LOGITS_BYTES, "cpu", 4 * 512 * 6)
    folder = tiny_model()
    engine = make_engine(folder)
    window = list(range(3, 53))
    sizes: list[int] = []
    engine.score([window], lambda _window, _start, logits: sizes.append(len(logits)))
    assert sizes == [6] * 8 + [2]
    (ours,) = scores(engine, [window])
    (expected,) = reference_scores(reference_model(folder), [window])
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_scores_may_be_changed_in_place(
    tiny_model: Callable[..., Path], make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(tiny_model())
    found: list[torch.Tensor] = []
    engine.score([[5, 6, 7]], lambda _window, _start, logits: found.append(logits.sub_(1)))
    assert len(found) == 1


def test_scoring_leaves_no_pages_behind_even_when_the_consumer_fails(
    tiny_model: Callable[..., Path], make_engine: Callable[..., Engine], prompts: list[list[int]]
) -> None:
    engine = make_engine(tiny_model(), max_num_batched_tokens=8)

    def fail(window: int, start: int, logits: torch.Tensor) -> None:
        if window == 3:
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        engine.score(prompts, fail)
    engine.check()
    assert not engine.has_work()
    assert engine.pool.num_free == engine.pool.num_pages
    scores(engine, prompts)


def test_a_window_that_does_not_fit_is_refused_before_any_work(
    tiny_model: Callable[..., Path], make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(tiny_model(), max_model_len=16)
    called: list[int] = []
    with pytest.raises(UsageError, match="max_model_len is 16"):
        engine.score([[5] * 16, [5] * 17], lambda window, _start, _logits: called.append(window))
    with pytest.raises(UsageError, match="no tokens"):
        engine.score([[5], []], lambda window, _start, _logits: called.append(window))
    assert not called
    assert not engine.has_work()
    engine.score([[5] * 16], lambda window, _start, _logits: called.append(window))
    assert called == [0]


def test_an_engine_with_requests_does_not_score(
    tiny_model: Callable[..., Path], make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(tiny_model())
    engine.add_request("a", [5], SamplingParams())
    with pytest.raises(UsageError, match="without other requests"):
        engine.score([[5]], lambda *_: None)
    assert engine.has_work()
