"""Windows and perplexity against plain torch on whole windows."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from quantforge.errors import EvaluationError, UsageError
from quantforge.evaluation import perplexity as module
from quantforge.evaluation.perplexity import evaluate_perplexity, target_nll, windows


def test_disjoint_windows_score_all_but_their_first_token() -> None:
    cut = windows(range(11), window=4)
    assert [list(w.token_ids) for w in cut] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [w.first_target for w in cut] == [1, 1]


def test_the_drawing_of_the_docstring_holds() -> None:
    cut = windows(range(10), window=4, stride=2)
    scored = [list(w.token_ids)[w.first_target :] for w in cut]
    assert scored == [[1, 2, 3], [4, 5], [6, 7], [8, 9]]


@given(length=st.integers(2, 200), window=st.integers(2, 40), stride=st.none() | st.integers(1, 40))
def test_with_a_stride_below_the_window_each_token_is_scored_once(
    length: int, window: int, stride: int | None
) -> None:
    if length < window or (stride is not None and stride > window):
        return
    cut = windows(range(length), window=window, stride=stride)
    scored = [t for w in cut for t in list(w.token_ids)[w.first_target :]]
    assert len(scored) == len(set(scored))
    assert all(len(w.token_ids) == window for w in cut)
    last = cut[-1].token_ids[-1]
    assert length - 1 - last < (stride or window), "only a partial window is dropped"
    if stride is not None and stride < window:
        assert scored == list(range(1, last + 1))


def test_bos_replaces_the_first_token_and_leaves_the_scored_ones() -> None:
    plain, with_bos = windows(range(8), window=4), windows(range(8), window=4, bos_token_id=99)
    assert [list(w.token_ids) for w in with_bos] == [[99, 1, 2, 3], [99, 5, 6, 7]]
    for a, b in zip(plain, with_bos, strict=True):
        assert a.token_ids[a.first_target :] == b.token_ids[b.first_target :]


@given(start=st.integers(0, 30), rows=st.integers(1, 20), first=st.integers(1, 20))
def test_scored_rows_predict_exactly_the_scored_tokens(start: int, rows: int, first: int) -> None:
    window = module.Window(token_ids=range(100, 120), first_target=first)
    chosen = window.scored_rows(start, rows)
    expected = [p for p in range(start, start + rows) if first <= p + 1 < 20]
    assert list(range(start, start + rows))[chosen] == expected
    assert window.targets(start, chosen) == [100 + p + 1 for p in expected]


@pytest.mark.parametrize(("window", "stride"), [(32, None), (32, 8), (50, 49), (200, None)])
@pytest.mark.parametrize("block", [1, 7, 1000])
def test_perplexity_equals_cross_entropy_over_whole_windows(
    fake_engine: Any, token_ids: list[int], window: int, stride: int | None, block: int
) -> None:
    engine = fake_engine(block=block, reuse_buffer=True)
    result = evaluate_perplexity(engine, token_ids, window=window, stride=stride)
    total, count = 0.0, 0
    end = 0
    for start in range(0, len(token_ids) - window + 1, stride or window):
        ids = token_ids[start : start + window]
        labels = torch.tensor(ids)
        labels[: max(0, end - start)] = -100
        end = start + window
        logits = engine.logits(ids).double()
        total += float(F.cross_entropy(logits[:-1], labels[1:], reduction="sum"))
        count += int((labels[1:] != -100).sum())
    assert result.protocol.num_scored_tokens == count
    assert result.perplexity == pytest.approx(math.exp(total / count), rel=1e-6)


def test_max_tokens_takes_the_first_tokens(fake_engine: Any, token_ids: list[int]) -> None:
    engine = fake_engine()
    part = evaluate_perplexity(engine, token_ids, window=32, max_tokens=100)
    assert part.perplexity == evaluate_perplexity(engine, token_ids[:100], window=32).perplexity
    assert part.protocol.num_text_tokens == 100
    assert part.protocol.num_windows == 3


def test_nll_in_row_blocks_equals_nll_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets = torch.randn(17, 33) * 8, torch.randint(0, 33, (17,))
    expected = F.cross_entropy(logits.double(), targets, reduction="none")
    for elements in (1, 100, 10**6):
        monkeypatch.setattr(module, "BLOCK_ELEMENTS", elements)
        torch.testing.assert_close(
            target_nll(logits, targets).double(), expected, rtol=1e-5, atol=1e-6
        )


def test_logits_too_large_for_exp_still_give_a_finite_nll() -> None:
    logits = torch.tensor([[3000.0, 2999.0, -3000.0]])
    expected = math.log(1 + math.exp(-1)) + 1
    assert float(target_nll(logits, torch.tensor([1]))) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_named_with_window_and_position(
    fake_engine: Any, token_ids: list[int], value: float
) -> None:
    engine = fake_engine(block=8, broken=lambda w, s: value if (w, s) == (2, 16) else None)
    with pytest.raises(EvaluationError, match=r"model's logits.*window 2, position 23"):
        evaluate_perplexity(engine, token_ids, window=32)


def test_a_text_below_a_window_is_refused(fake_engine: Any, token_ids: list[int]) -> None:
    with pytest.raises(EvaluationError, match="has 200 tokens, fewer than a window of 201"):
        evaluate_perplexity(fake_engine(), token_ids, window=201)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"window": 1}, "window is 1"),
        ({"window": 32, "stride": 0}, "stride is 0.*1 to 32"),
        ({"window": 32, "stride": 33}, "stride is 33"),
        ({"window": 32, "max_tokens": 31}, "max_tokens is 31"),
        ({"window": 513}, "takes at most 512"),
    ],
)
def test_lengths_that_make_no_sense_are_refused(
    fake_engine: Any, token_ids: list[int], settings: dict[str, int], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        evaluate_perplexity(fake_engine(), token_ids * 5, **settings)
