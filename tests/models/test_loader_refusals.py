"""Bad checkpoints are refused with the tensor's name, where possible before anything is read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantforge.checkpoint.reader import CheckpointReader
from quantforge.errors import CheckpointError, QuantForgeError, UnsupportedError, UsageError
from quantforge.models.decoder import Decoder
from quantforge.models.loader import load_decoder
from quantforge.schemes import QuantScheme, TensorQuant

INT4_GROUP = QuantScheme(
    weight=TensorQuant(num_bits=4, symmetric=False, granularity="group", group_size=32)
)
INT4_WIDE = QuantScheme(weight=TensorQuant(num_bits=4, granularity="group", group_size=64))

TinyModel = Callable[..., Path]
QuantizedModel = Callable[[Path, Callable[[str], QuantScheme | None]], Path]


def load(folder: Path, **arguments: Any) -> Decoder:
    settings: dict[str, Any] = {"device": "cpu", "dtype": torch.float32} | arguments
    return load_decoder(CheckpointReader(folder), **settings)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def reconfigure(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def refusal(folder: Path, kind: type[QuantForgeError], words: str, **arguments: Any) -> None:
    """Loading fails with these words, before any tensor is read."""
    reader = CheckpointReader(folder)

    def read(name: str) -> Tensor:
        raise AssertionError(f"{name} was read")

    reader.tensor = read  # type: ignore[method-assign]
    with pytest.raises(kind, match=words):
        load_decoder(reader, device="cpu", dtype=torch.float32, **arguments)


def test_a_rank_boundary_inside_a_group_is_refused_before_loading(
    tiny_model: TinyModel, quantized_model: QuantizedModel
) -> None:
    folder = quantized_model(tiny_model(), lambda _: INT4_WIDE)
    words = "layers.0.self_attn.o_proj: 2 ranks cut its 64 inputs into 32, which group_size 64"
    refusal(folder, UnsupportedError, words, rank=0, world=2)


def test_heads_that_ranks_cannot_share_are_refused_before_loading(tiny_model: TinyModel) -> None:
    words = "num_key_value_heads 2 is not divisible by 4 ranks"
    refusal(tiny_model(), UnsupportedError, words, rank=0, world=4)


def test_a_rank_outside_the_world_is_refused(tiny_model: TinyModel) -> None:
    refusal(tiny_model(), UsageError, r"rank 2 is not in 0..1 \(world 2\)", rank=2, world=2)


NAMES = (
    "model.embed_tokens.weight",
    "model.norm.weight",
    "lm_head.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.1.self_attn.q_norm.weight",
    "model.layers.1.self_attn.k_proj.weight",
    "model.layers.1.self_attn.o_proj.bias",
    "model.layers.0.mlp.down_proj.weight",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_tensor_is_named_before_loading(name: str, tiny_model: TinyModel) -> None:
    folder = rewrite(tiny_model("qwen3", attention_bias=True), lambda t: t.pop(name))
    refusal(folder, CheckpointError, f"tensor {name} is missing")


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_of_another_shape_is_named_before_loading(
    name: str, tiny_model: TinyModel
) -> None:
    def widen(tensors: dict[str, Tensor]) -> None:
        tensors[name] = torch.cat((tensors[name], tensors[name][:1]))

    folder = rewrite(tiny_model("qwen3", attention_bias=True), widen)
    refusal(folder, CheckpointError, rf"tensor {name} has shape \[.*config.json makes it \[")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", NAMES)
def test_a_value_that_is_not_finite_is_named(name: str, bad: float, tiny_model: TinyModel) -> None:
    def poison(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[-1] = bad

    folder = rewrite(tiny_model("qwen3", attention_bias=True), poison)
    with pytest.raises(CheckpointError, match=f"tensor {name} holds 1 values that are NaN"):
        load(folder)


def test_weights_too_large_for_float16_are_named(tiny_model: TinyModel) -> None:
    def enlarge(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = 1e5

    folder = rewrite(tiny_model(), enlarge)
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.up_proj.weight holds 1 .*float16"):
        load(folder, dtype=torch.float16)
    load(folder, dtype=torch.float32)


def test_integer_weights_without_a_scheme_are_refused(tiny_model: TinyModel) -> None:
    name = "model.layers.0.mlp.up_proj.weight"

    def cast(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].to(torch.int8)

    refusal(rewrite(tiny_model(), cast), CheckpointError, f"{name} is torch.int8, not floating")


def test_a_bias_that_the_config_denies_is_refused(tiny_model: TinyModel) -> None:
    folder = reconfigure(tiny_model(attention_bias=True), attention_bias=False)
    refusal(folder, CheckpointError, "q_proj.bias is there, but config.json says no bias")


def test_an_untied_config_without_a_head_is_refused(tiny_model: TinyModel) -> None:
    folder = reconfigure(tiny_model(tie_word_embeddings=True), tie_word_embeddings=False)
    refusal(folder, CheckpointError, "tensor lm_head.weight is missing")


@pytest.mark.parametrize(
    ("suffix", "change", "words"),
    [
        ("weight_scale", lambda t: t * float("nan"), "weight_scale holds 256 values that are NaN"),
        ("weight_scale", lambda t: t[:, :1].contiguous(), r"weight_scale has shape \[64, 1\]"),
        ("weight_packed", lambda t: t[:-1].contiguous(), r"weight_packed has shape \[63, 16\]"),
    ],
    ids=["nan scale", "lost groups", "lost rows"],
)
def test_damage_to_a_quantized_layer_is_named(
    suffix: str,
    change: Callable[[Tensor], Tensor],
    words: str,
    tiny_model: TinyModel,
    quantized_model: QuantizedModel,
) -> None:
    folder = quantized_model(tiny_model(), lambda _: INT4_GROUP)
    name = f"model.layers.1.mlp.down_proj.{suffix}"
    rewrite(folder, lambda tensors: tensors.update({name: change(tensors[name])}))
    with pytest.raises(CheckpointError, match=f"layers.1.mlp.down_proj.{words}"):
        load(folder)


def test_forbidding_the_references_is_an_error_with_the_reason(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUANTFORGE_KERNELS", "triton")
    with pytest.raises(UnsupportedError, match="no kernel for rms_norm"):
        load(tiny_model())
