"""The real engine on tiny models against plain transformers scripts, and the commands' contract."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from quantforge.errors import EvaluationError, UsageError
from quantforge.evaluation.divergence import compare
from quantforge.evaluation.measure import EvalSettings, measure
from quantforge.evaluation.perplexity import evaluate_perplexity
from quantforge.evaluation.texts import EvalText, load_text
from quantforge.runtime.config import EngineConfig
from quantforge.runtime.engine import Engine

WINDOW = 64
SMALL_STEPS = EngineConfig(
    device="cpu", dtype="float32", kv_cache_tokens=256, max_num_batched_tokens=24, page_size=16
)


def script_logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0].float()
    return logits


def script_nll(model: Any, ids: list[int], window: int, stride: int, bos: int | None) -> float:
    """The usual Hugging Face recipe: labels of tokens scored before are masked."""
    total, count, end = 0.0, 0, 0
    for start in range(0, len(ids) - window + 1, stride):
        part = ids[start : start + window]
        labels = torch.tensor(part)
        labels[: max(0, end - start)] = -100
        end = start + window
        fed = part if bos is None else [bos, *part[1:]]
        logits = script_logits(model, fed)
        total += float(F.cross_entropy(logits[:-1], labels[1:], reduction="sum"))
        count += int((labels[1:] != -100).sum())
    return total / count


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize(("stride", "bos"), [(WINDOW, None), (17, None), (WINDOW, 1)])
def test_perplexity_equals_a_transformers_script(
    tiny_model: Callable[..., Path],
    reference_model: Callable[[Path], Any],
    text_file: Path,
    arch: str,
    stride: int,
    bos: int | None,
) -> None:
    folder = tiny_model(arch)
    engine = Engine.from_folder(folder, SMALL_STEPS)
    assert engine.tokenizer is not None
    ids = engine.tokenizer.encode(text_file.read_text())[:500]
    found = evaluate_perplexity(engine, ids, window=WINDOW, stride=stride, bos_token_id=bos)
    expected = math.exp(script_nll(reference_model(folder), ids, WINDOW, stride, bos))
    assert found.perplexity == pytest.approx(expected, rel=1e-5)
    engine.check()
    assert not engine.has_work()


def test_divergence_equals_a_transformers_script(
    pair: tuple[Path, Path], reference_model: Callable[[Path], Any], text_file: Path
) -> None:
    config = EngineConfig(
        device="cpu", dtype="float32", kv_cache_tokens=256, max_num_batched_tokens=40
    )
    engine, baseline = Engine.from_folder(pair[0], SMALL_STEPS), Engine.from_folder(pair[1], config)
    assert engine.tokenizer is not None
    ids = engine.tokenizer.encode(text_file.read_text())[:400]
    found = compare(engine, baseline, ids, window=WINDOW)
    q_model, p_model = reference_model(pair[0]), reference_model(pair[1])
    kl, agree, nll, nll_base = [], [], [], []
    for start in range(0, len(ids) - WINDOW + 1, WINDOW):
        part = ids[start : start + WINDOW]
        q = script_logits(q_model, part)[:-1].log_softmax(-1)
        p = script_logits(p_model, part)[:-1].log_softmax(-1)
        kl.append(F.kl_div(q, p, reduction="none", log_target=True).sum(-1))
        agree.append((q.argmax(-1) == p.argmax(-1)).float())
        nll.append(F.nll_loss(q, torch.tensor(part[1:]), reduction="none"))
        nll_base.append(F.nll_loss(p, torch.tensor(part[1:]), reduction="none"))
    all_kl = torch.cat(kl)
    assert found.mean_kl == pytest.approx(float(all_kl.mean()), rel=1e-4)
    assert found.kl_quantile(0.99) == pytest.approx(float(all_kl.quantile(0.99)), rel=1e-4)
    assert found.top1 == pytest.approx(float(torch.cat(agree).mean()), rel=1e-6)
    ratio = math.exp(float(torch.cat(nll).mean() - torch.cat(nll_base).mean()))
    assert found.ppl_ratio == pytest.approx(ratio, rel=1e-5)
    for each in (engine, baseline):
        each.check()
        assert not each.has_work()


def settings(**changes: Any) -> EvalSettings:
    return EvalSettings(**{"window": WINDOW, "device": "cpu", "max_tokens": 320} | changes)


def test_a_measurement_names_device_dtype_kernels_text_and_protocol(
    pair: tuple[Path, Path], text_file: Path
) -> None:
    text = load_text(str(text_file))
    document = measure(*pair, text, settings()).to_dict()
    for role in ("engine", "baseline_engine"):
        assert document[role]["device"] == "cpu"
        assert document[role]["dtype"] == "float32"
        assert document[role]["kernels"]
    assert document["text"]["sha256"] == text.sha256
    assert document["protocol"] == {
        "window": WINDOW,
        "stride": WINDOW,
        "bos_token_id": None,
        "partial_window": "dropped",
        "num_text_tokens": 320,
        "num_windows": 5,
        "num_scored_tokens": 5 * (WINDOW - 1),
    }
    assert document["bits_per_weight"] == 32
    json.dumps(document, allow_nan=False)


def test_bos_comes_from_the_models_tokenizer(pair: tuple[Path, Path], text_file: Path) -> None:
    found = measure(pair[0], None, load_text(str(text_file)), settings(bos=True))
    assert found.perplexity.protocol.bos_token_id == 1


def test_a_baseline_of_another_vocabulary_is_refused_before_loading(
    tiny_model: Callable[..., Path], text_file: Path
) -> None:
    model, baseline = tiny_model(), tiny_model(vocab_size=400)
    (baseline / "model.safetensors").unlink()
    with pytest.raises(EvaluationError, match="different vocabularies: 512 and 400 tokens"):
        measure(model, baseline, load_text(str(text_file)), settings())


def edit_tokenizer(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    path.write_text(json.dumps(document, indent=4), encoding="utf-8")


def test_a_tokenizer_with_two_tokens_exchanged_is_refused(
    pair: tuple[Path, Path], text_file: Path
) -> None:
    def exchange(document: dict[str, Any]) -> None:
        vocab = document["model"]["vocab"]
        first, second = [token for token, i in vocab.items() if i in (300, 301)]
        vocab[first], vocab[second] = vocab[second], vocab[first]

    edit_tokenizer(pair[1], exchange)
    with pytest.raises(EvaluationError, match="different vocabularies: token 300"):
        measure(*pair, load_text(str(text_file)), settings())


def test_a_tokenizer_that_cuts_the_text_otherwise_is_refused(
    pair: tuple[Path, Path], text_file: Path
) -> None:
    edit_tokenizer(pair[1], lambda document: document["model"]["merges"].clear())
    with pytest.raises(EvaluationError, match="cut the evaluation text differently"):
        measure(*pair, load_text(str(text_file)), settings())


def test_a_tokenizer_file_written_anew_is_the_same_tokenizer(
    pair: tuple[Path, Path], text_file: Path
) -> None:
    before = measure(*pair, load_text(str(text_file)), settings())
    edit_tokenizer(pair[1], lambda document: None)
    after = measure(*pair, load_text(str(text_file)), settings())
    assert after.metrics() == before.metrics()


def test_a_window_beyond_the_models_positions_is_refused(
    pair: tuple[Path, Path], tiny: Any
) -> None:
    text = EvalText(name="long", text=tiny.TEXT * 20, sha256="")
    with pytest.raises(UsageError, match=r"windows of 513 tokens.*512 positions"):
        measure(pair[0], None, text, settings(window=513, max_tokens=None))


@pytest.mark.gpu
def test_a_gpu_measures_what_the_cpu_measures(pair: tuple[Path, Path], text_file: Path) -> None:
    text = load_text(str(text_file))
    on_cpu = measure(*pair, text, settings(dtype="float32"))
    on_gpu = measure(*pair, text, settings(dtype="float32", device="cuda"))
    assert on_gpu.metrics() == pytest.approx(on_cpu.metrics(), rel=1e-2)
    assert on_gpu.engine["device"].startswith("cuda")
