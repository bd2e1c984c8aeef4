"""Verification finds each kind of damage, and describes what is whole."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantforge.checkpoint.inspection import bits_per_weight, describe_checkpoint
from quantforge.checkpoint.manifest import append_evaluation
from quantforge.checkpoint.reader import CheckpointReader
from quantforge.checkpoint.verify import VerifyReport, verify_checkpoint
from quantforge.errors import UnsupportedError
from quantforge.schemes import QuantScheme, preset

MakeCheckpoint = Callable[..., Path]
DOWN = "model.layers.1.mlp.down_proj"
LAYERS = [f"model.layers.{i}.{n}" for i in (0, 1) for n in ("self_attn.q_proj", "mlp.down_proj")]


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def failed(report: VerifyReport) -> dict[str, str]:
    return {check.name: check.detail for check in report.failures()}


@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 10_000])
@pytest.mark.parametrize("quantized", [True, False])
def test_a_whole_checkpoint_passes(
    make_checkpoint: MakeCheckpoint, shard_bytes: int, quantized: bool, scheme: QuantScheme
) -> None:
    folder = make_checkpoint(quantized=quantized, max_shard_bytes=shard_bytes)
    append_evaluation(folder, {"ppl": 3.0})
    expected = dict.fromkeys(LAYERS, scheme) if quantized else {}
    steps: list[tuple[str, int, int]] = []
    report = verify_checkpoint(folder, expected=expected, progress=lambda *s: steps.append(s))
    assert failed(report) == {}
    assert report.ok
    last = {stage: (done, total) for stage, done, total in steps}
    assert all(done == total for done, total in last.values())


DAMAGE: dict[str, tuple[str, str, Callable[[dict[str, torch.Tensor]], object]]] = {
    "NaN scale": ("scales", DOWN, lambda t: t[f"{DOWN}.weight_scale"][3, 1].fill_(torch.nan)),
    "zero scale": ("scales", DOWN, lambda t: t[f"{DOWN}.weight_scale"][0, 0].fill_(0)),
    "scale missing": (
        "tensors",
        "weight_scale is missing",
        lambda t: t.pop(f"{DOWN}.weight_scale"),
    ),
    "zero points missing": (
        "tensors",
        "weight_zero_point is missing",
        lambda t: t.pop(f"{DOWN}.weight_zero_point"),
    ),
    "cut codes": (
        "tensors",
        "weight_packed",
        lambda t: t.update({f"{DOWN}.weight_packed": t[f"{DOWN}.weight_packed"][:, 1:].clone()}),
    ),
    "left-over weight": (
        "tensors",
        "left-over tensors: weight",
        lambda t: t.update({f"{DOWN}.weight": torch.zeros(64, 96)}),
    ),
    "NaN in a norm": ("dense", "model.norm", lambda t: t["model.norm.weight"][0].fill_(torch.nan)),
    "layer gone": (
        "blocks",
        "layers.1.mlp.down_proj is missing",
        lambda t: [t.pop(n) for n in list(t) if n.startswith(DOWN)],
    ),
    "block gone": (
        "blocks",
        "layers.1 is missing",
        lambda t: [t.pop(n) for n in list(t) if "layers.1." in n],
    ),
    "lm_head lost": ("embeddings", "lm_head is missing", lambda t: t.pop("lm_head.weight")),
    "embedding lost": (
        "embeddings",
        "embedding is missing",
        lambda t: t.pop("model.embed_tokens.weight"),
    ),
    "dense target": (
        "targets",
        f"{DOWN} is a target",
        lambda t: [
            *(t.pop(n) for n in list(t) if n.startswith(DOWN)),
            t.update({f"{DOWN}.weight": torch.zeros(64, 96)}),
        ],
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_each_damage_is_found_and_named(make_checkpoint: MakeCheckpoint, damage: str) -> None:
    check, says, change = DAMAGE[damage]
    folder = make_checkpoint()
    change_tensors(folder, change)
    problems = failed(verify_checkpoint(folder, check_hashes=False))
    assert says in problems[check]


def test_a_changed_an_added_and_a_missing_file_are_found(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint()
    change_config(folder, extra=1)
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text("{}")
    report = verify_checkpoint(folder)
    detail = failed(report)["hashes"]
    assert "config.json was changed" in detail
    assert "tokenizer.json is missing" in detail
    assert "vocab.json was added" in detail
    assert verify_checkpoint(folder, check_hashes=False).ok


def test_a_plan_that_was_not_kept_is_found(
    make_checkpoint: MakeCheckpoint, scheme: QuantScheme
) -> None:
    folder = make_checkpoint()
    plan = dict.fromkeys(LAYERS, scheme)
    plan["lm_head"] = scheme
    plan[DOWN] = preset("w8a16")
    left = plan.pop(LAYERS[0])
    assert left == scheme
    detail = failed(verify_checkpoint(folder, expected=plan))["targets"]
    assert "lm_head should be int4-g32-asym, but is not quantized" in detail
    assert f"{DOWN} should be int8-channel-sym, but is int4-g32-asym" in detail
    assert f"{LAYERS[0]} should not be quantized" in detail


def test_a_run_that_quantized_nothing_is_found(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(quantized=False)
    donor = json.loads((make_checkpoint("donor") / "config.json").read_text())
    change_config(folder, quantization_config=donor["quantization_config"])
    detail = failed(verify_checkpoint(folder))["targets"]
    assert "config.json declares quantization, but no layer is quantized" in detail


def test_quantized_layers_that_the_config_hides_are_found(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint()
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    problems = failed(verify_checkpoint(folder))
    assert "quantized, but not by config.json" in problems["targets"]


def test_a_target_that_does_not_exist_is_found(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint()
    config = json.loads((folder / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["targets"] += ["model.layers.7.mlp.down_proj"]
    change_config(folder, **config)
    assert "layers.7.mlp.down_proj does not exist" in failed(verify_checkpoint(folder))["targets"]


def test_left_over_shards_and_tensors_are_found(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(max_shard_bytes=10_000)
    shutil.copy(sorted(folder.glob("*.safetensors"))[0], folder / "model-old.safetensors")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.norm.weight"]
    index["metadata"]["total_size"] += 1
    path.write_text(json.dumps(index))
    problems = failed(verify_checkpoint(folder))
    assert "model-old.safetensors is not part of the model" in problems["files"]
    assert "tensor model.norm.weight is not in" in problems["files"]
    assert "bytes; the tensors have" in problems["size"]


def test_an_unreadable_folder_is_a_failed_check(make_checkpoint: MakeCheckpoint) -> None:
    path = make_checkpoint() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    report = verify_checkpoint(path.parent)
    assert not report.ok
    assert "no whole safetensors file" in failed(report)["files"]


def test_a_foreign_format_is_unsupported_not_broken(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint()
    change_config(folder, quantization_config={"quant_method": "hqq", "bits": 4})
    with pytest.raises(UnsupportedError, match="hqq"):
        verify_checkpoint(folder)


def test_tied_embeddings_need_no_lm_head(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint()
    change_tensors(folder, lambda t: t.pop("lm_head.weight"))
    change_config(folder, tie_word_embeddings=True)
    assert verify_checkpoint(folder, check_hashes=False).ok


def test_bits_per_weight_count_codes_scales_zero_points_and_shape(
    make_checkpoint: MakeCheckpoint,
) -> None:
    stored = weights = 0
    for columns in (64, 96):
        groups = columns // 32
        stored += 64 * columns * 4 + 64 * groups * 32 + 64 * groups * 4 + 2 * 64
        weights += 64 * columns
    assert bits_per_weight(CheckpointReader(make_checkpoint())) == pytest.approx(stored / weights)
    dense = make_checkpoint("dense", quantized=False)
    assert bits_per_weight(CheckpointReader(dense)) == 32


def test_the_description_adds_up(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint()
    document = describe_checkpoint(folder)
    tensors = load_file(folder / "model.safetensors")
    parts = dict(document["bytes"])
    assert parts.pop("total") == sum(t.nbytes for t in tensors.values()) == sum(parts.values())
    assert parts["embeddings"] == 40 * 64 * 4
    assert parts["other"] == 3 * 64 * 4
    assert document["num_weights"] == 2 * 64 * (64 + 96) + 2 * 40 * 64 + 3 * 64
    assert {s["scheme"]: s["num_layers"] for s in document["schemes"]} == {
        "int4-g32-asym": 4,
        "dense": 1,
    }
    bits = document["bits_per_weight"]["model"]
    assert bits == pytest.approx(8 * document["bytes"]["total"] / document["num_weights"])
    assert document["provenance"]["method"] == "rtn"
    json.dumps(document, allow_nan=False)
