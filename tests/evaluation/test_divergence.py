"""KL, top-1 and the comparison of two engines against plain torch in float64."""

import math
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from quantforge.errors import EvaluationError, UsageError
from quantforge.evaluation import perplexity as perplexity_module
from quantforge.evaluation.divergence import compare, kl_divergence, top1_agrees
from quantforge.evaluation.side_by_side import THREAD_NAME


def scoring_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == THREAD_NAME]


def oracle(engine: Any, baseline: Any, token_ids: list[int], window: int) -> dict[str, Any]:
    """Every figure from whole windows of float64 logits, by torch's own functions."""
    kl, agree, nll, nll_base = [], [], [], []
    for start in range(0, len(token_ids) - window + 1, window):
        ids = token_ids[start : start + window]
        q, p = (e.logits(ids)[:-1].double().log_softmax(-1) for e in (engine, baseline))
        kl.append(F.kl_div(q, p, reduction="none", log_target=True).sum(-1))
        agree.append((p.argmax(-1) == q.argmax(-1)).double())
        nll.append(F.nll_loss(q, torch.tensor(ids[1:]), reduction="none"))
        nll_base.append(F.nll_loss(p, torch.tensor(ids[1:]), reduction="none"))
    all_kl = torch.cat(kl)
    return {
        "mean_kl": float(all_kl.mean()),
        "median_kl": float(all_kl.quantile(0.5)),
        "p99_kl": float(all_kl.quantile(0.99)),
        "max_kl": float(all_kl.max()),
        "top1": float(torch.cat(agree).mean()),
        "ppl_ratio": math.exp(float(torch.cat(nll).mean() - torch.cat(nll_base).mean())),
        "ppl_baseline": math.exp(float(torch.cat(nll_base).mean())),
    }


@pytest.mark.parametrize(("block", "baseline_block"), [(7, 7), (7, 16), (32, 5), (1, 1000)])
def test_every_figure_equals_plain_torch_whatever_the_blocks(
    fake_engine: Any, token_ids: list[int], block: int, baseline_block: int
) -> None:
    engine = fake_engine(noise=0.3, block=block, reuse_buffer=True)
    baseline = fake_engine(block=baseline_block, reuse_buffer=True)
    found = compare(engine, baseline, token_ids, window=32)
    expected = oracle(engine, baseline, token_ids, 32)
    assert found.metrics() == pytest.approx(expected, rel=1e-5)


def test_a_model_against_itself_diverges_by_exactly_nothing(
    fake_engine: Any, token_ids: list[int]
) -> None:
    found = compare(fake_engine(), fake_engine(block=3), token_ids, window=32)
    assert found.mean_kl == found.kl_quantile(1.0) == 0
    assert found.top1 == found.ppl_ratio == 1
    assert found.ppl_ratio_interval() == (1, 1)


def test_divergence_is_from_the_baseline_to_the_model() -> None:
    p, q = torch.tensor([[4.0, 0.0, 0.0]]), torch.zeros(1, 3)
    expected = sum(
        w * math.log(w * 3) for w in F.softmax(p[0].double(), 0).tolist()
    )  # KL(p || uniform)
    assert float(kl_divergence(p, q)) == pytest.approx(expected, rel=1e-6)
    assert float(kl_divergence(q, p)) != pytest.approx(expected, rel=0.1)


def test_divergence_is_never_negative() -> None:
    logits = torch.randn(64, 1000) * 5
    assert float(kl_divergence(logits, logits + 1e-6 * torch.randn(64, 1000)).min()) >= 0


def test_divergence_in_row_blocks_equals_divergence_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p, q = torch.randn(19, 50), torch.randn(19, 50)
    at_once = kl_divergence(p, q)
    monkeypatch.setattr(perplexity_module, "BLOCK_ELEMENTS", 120)
    torch.testing.assert_close(kl_divergence(p, q), at_once, rtol=0, atol=0)


def test_divergence_ignores_a_constant_added_to_all_logits() -> None:
    p, q = torch.randn(5, 50), torch.randn(5, 50)
    torch.testing.assert_close(kl_divergence(p + 3, q - 8), kl_divergence(p, q))


def test_top1_agrees_where_the_largest_logits_coincide() -> None:
    p = torch.tensor([[0.0, 2.0, 1.0], [5.0, 2.0, 1.0]])
    q = torch.tensor([[0.0, 9.0, 8.0], [1.0, 2.0, 1.0]])
    assert top1_agrees(p, q).tolist() == [True, False]


def test_the_interval_holds_the_ratio_and_repeats_for_a_seed(
    fake_engine: Any, token_ids: list[int]
) -> None:
    found = compare(fake_engine(noise=0.3), fake_engine(), token_ids, window=20)
    interval = found.ppl_ratio_interval()
    assert interval is not None
    assert interval[0] < found.ppl_ratio < interval[1]
    assert interval == found.ppl_ratio_interval()


def test_one_window_has_no_interval(fake_engine: Any, token_ids: list[int]) -> None:
    found = compare(fake_engine(noise=0.3), fake_engine(), token_ids, window=150)
    assert found.to_dict()["ppl_ratio_interval"] is None


def test_the_figures_can_be_made_again_from_the_windows(
    fake_engine: Any, token_ids: list[int]
) -> None:
    found = compare(fake_engine(noise=0.3), fake_engine(), token_ids, window=20, stride=10)
    sums = {name: np.array(values).sum() for name, values in found.windows().items()}
    assert math.exp(sums["nll"] / sums["count"]) == pytest.approx(found.model.perplexity)
    assert sums["kl"] / sums["count"] == pytest.approx(found.mean_kl)
    assert sums["top1"] / sums["count"] == pytest.approx(found.top1)
    assert sum(found.kl_histogram()["counts"]) == sums["count"] == len(found.kl_N)


@pytest.mark.parametrize("role", ["model", "baseline"])
def test_nan_of_either_engine_is_an_error_that_names_it(
    fake_engine: Any, token_ids: list[int], role: str
) -> None:
    def broken(window: int, start: int) -> float | None:
        return math.nan if start == 14 else None

    engines = {"model": fake_engine(), "baseline": fake_engine()}
    engines[role] = fake_engine(broken=broken)
    with pytest.raises(EvaluationError, match=f"the {role}'s logits.*window 0, position 20"):
        compare(engines["model"], engines["baseline"], token_ids, window=32)
    assert engines["baseline"].unwound == 1, "the baseline's scoring ends with the error"
    assert not scoring_threads()


def test_vocabularies_of_different_widths_are_an_error(
    fake_engine: Any, token_ids: list[int]
) -> None:
    with pytest.raises(EvaluationError, match="vocabulary of 61, the baseline one of 64"):
        compare(fake_engine(), fake_engine(vocab=64), token_ids, window=32)


def test_a_window_beyond_the_baselines_context_is_refused(
    fake_engine: Any, token_ids: list[int]
) -> None:
    with pytest.raises(UsageError, match="the baseline takes at most 31"):
        compare(fake_engine(), fake_engine(max_model_len=31), token_ids, window=32)


def test_progress_ends_complete(fake_engine: Any, token_ids: list[int]) -> None:
    said: list[tuple[int, int]] = []
    compare(
        fake_engine(),
        fake_engine(),
        token_ids,
        window=50,
        progress=lambda stage, done, total: said.append((done, total)),
    )
    assert said[0] == (0, 200)
    assert said[-1] == (200, 200)


def test_a_comparison_holds_one_block_of_each_engines_logits(
    fake_engine: Any, token_ids: list[int]
) -> None:
    class Watched(fake_engine):  # type: ignore[misc]
        def score(self, windows: Any, consume: Any, progress: Any = None) -> None:
            blocks: list[weakref.ref[torch.Tensor]] = []
            rows = self.logits(windows[0])
            for start in range(0, len(rows), self.block):
                block = rows[start : start + self.block].clone()
                blocks.append(weakref.ref(block))
                consume(0, start, block)
                del block
                assert sum(b() is not None for b in blocks) <= 1

    compare(Watched(block=5), Watched(block=8), token_ids, window=100)
