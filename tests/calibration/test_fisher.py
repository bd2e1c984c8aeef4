"""Sensitivities against transformers' autograd, and against the divergence that they predict.

Legend: S samples, T tokens of a sample, R rows (tokens), N out features, K in features.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantforge.calibration import fisher
from quantforge.calibration.fisher import LinearSensitivity, block_sensitivities
from quantforge.checkpoint.reader import CheckpointReader
from quantforge.errors import CalibrationError

TinyModel = Callable[..., Path]
CPU = torch.device("cpu")


def token_ids(samples: int = 6, length: int = 24) -> Tensor:
    return torch.randint(3, 512, (samples, length), generator=torch.Generator().manual_seed(3))


def measured(folder: Path, tokens: Tensor, **options: Any) -> dict[str, LinearSensitivity]:
    found = block_sensitivities(
        CheckpointReader(folder), tokens, device=CPU, dtype=torch.float32, **options
    )
    return {f"model.layers.{b.layer}.{n}": s for b in found for n, s in b.linears.items()}


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    named = model.named_modules()
    return {n: m for n, m in named if isinstance(m, nn.Linear) and n.endswith("_proj")}


def seen_by_autograd(model: Any, tokens: Tensor, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """(inputs [R, K], gradients [R, N]) of every linear, for tokens drawn from the model."""
    seen: dict[str, list[Tensor]] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Tensor], out: Tensor) -> None:
            out.requires_grad_(True)
            out.retain_grad()
            seen[name] = [inputs[0].detach(), out]

        return hook

    handles = [m.register_forward_hook(watch(n)) for n, m in linears(model).items()]
    log_p = model(tokens).logits.log_softmax(-1).flatten(0, 1)
    draws = torch.rand(len(log_p), generator=torch.Generator().manual_seed(seed))
    drawn = (log_p.exp().cumsum(-1) < draws.unsqueeze(1)).sum(-1)
    log_p[torch.arange(len(log_p)), drawn].sum().backward()
    for handle in handles:
        handle.remove()
    return {n: (x.flatten(0, 1), out.grad.flatten(0, 1)) for n, (x, out) in seen.items()}


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_and_moments_are_those_of_autograd(
    arch: str, tied: bool, tiny_model: TinyModel, reference_model: Callable[..., Any]
) -> None:
    folder = tiny_model(arch, tie_word_embeddings=tied)
    ours = measured(folder, token_ids(), seed=5)
    theirs = seen_by_autograd(reference_model(folder), token_ids(), seed=5)
    assert ours.keys() == theirs.keys()
    for name, (x_RK, gradient_RN) in theirs.items():
        squared = gradient_RN.square()
        torch.testing.assert_close(ours[name].row_weight, squared.mean(0), rtol=1e-3, atol=1e-7)
        share_R = squared.sum(1) / squared.sum()
        moment = torch.einsum("r,rk,rl->kl", share_R, x_RK, x_RK)
        torch.testing.assert_close(ours[name].moment, moment, rtol=1e-3, atol=1e-5)


def test_the_last_block_comes_first_and_a_seed_repeats(tiny_model: TinyModel) -> None:
    reader = CheckpointReader(tiny_model())
    runs = [
        list(block_sensitivities(reader, token_ids(), device=CPU, dtype=torch.float32, seed=1))
        for _ in range(2)
    ]
    assert [block.layer for block in runs[0]] == [1, 0]
    for first, second in zip(*runs, strict=True):
        for name, sensitivity in first.linears.items():
            assert torch.equal(sensitivity.moment, second.linears[name].moment)
            assert torch.equal(sensitivity.row_weight, second.linears[name].row_weight)


def test_fitted_samples_give_statistics_only(tiny_model: TinyModel) -> None:
    reader, tokens = CheckpointReader(tiny_model()), token_ids()

    def run(text: Tensor, **options: Any) -> list[fisher.BlockSensitivity]:
        return list(block_sensitivities(reader, text, device=CPU, dtype=torch.float32, **options))

    both = run(tokens, num_fitted=4)
    for block, fitted, rest in zip(both, run(tokens[:4]), run(tokens[4:]), strict=True):
        for name, statistics in block.statistics.items():
            want = fitted.statistics[name]
            assert statistics.num_tokens == 4 * 24
            torch.testing.assert_close(statistics.second_moment, want.second_moment)
        for name, sensitivity in block.linears.items():
            torch.testing.assert_close(sensitivity.moment, rest.linears[name].moment)
            torch.testing.assert_close(sensitivity.row_weight, rest.linears[name].row_weight)


@torch.inference_mode()
def divergence(model: Any, tokens: Tensor, changed: dict[str, Tensor]) -> float:
    """Mean KL a token of the model with `changed` added to its weights, from what it was."""
    before = model(tokens).logits.log_softmax(-1)
    modules = linears(model)
    for name, delta in changed.items():
        modules[name].weight += delta
    after = model(tokens).logits.log_softmax(-1)
    for name, delta in changed.items():
        modules[name].weight -= delta
    return float((before.exp() * (before - after)).sum(-1).mean())


@pytest.mark.parametrize("kind", ["v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "_proj"])
def test_the_divergence_of_small_random_changes_is_predicted(
    kind: str, tiny_model: TinyModel, reference_model: Callable[..., Any]
) -> None:
    """One draw of tokens and independent rows leave some noise: within a third of the truth."""
    folder = tiny_model()
    tokens = token_ids(24, 32)
    ours = {n: s for n, s in measured(folder, tokens).items() if n.endswith(kind)}
    model = reference_model(folder)
    generator = torch.Generator().manual_seed(0)
    predicted = actual = 0.0
    for _ in range(6):
        changed = {
            n: 2e-3 * torch.randn(len(s.row_weight), len(s.moment), generator=generator)
            for n, s in ours.items()
        }
        predicted += sum(ours[n].divergence(delta) for n, delta in changed.items())
        actual += divergence(model, tokens, changed)
    assert predicted == pytest.approx(actual, rel=0.35)


def test_gradients_that_overflow_name_the_layer(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    infinite = torch.full((token_ids().numel(), 64), float("inf"))
    monkeypatch.setattr(fisher, "_head_gradient", lambda *_: infinite)
    with pytest.raises(CalibrationError, match="gradients in layer 1"):
        measured(tiny_model(), token_ids())
