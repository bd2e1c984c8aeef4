"""Statistics and hidden states of calibration against hooks on transformers' model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantforge.calibration.activations import Activations
from quantforge.calibration.capture import Capture
from quantforge.calibration.collect import collect_statistics
from quantforge.calibration.data import CalibrationSet
from quantforge.calibration.statistics import StatisticsFile, origin_of, save_statistics
from quantforge.checkpoint.reader import CheckpointReader
from quantforge.errors import CalibrationError
from quantforge.models.loader import architecture_of, load_block, load_config, load_embedding

TinyModel = Callable[..., Path]
ReferenceModel = Callable[..., Any]

CPU = torch.device("cpu")
FIRST_MEMBER = {
    "qkv": "self_attn.q_proj",
    "o": "self_attn.o_proj",
    "gate_up": "mlp.gate_proj",
    "down": "mlp.down_proj",
}
FAMILIES = {
    "llama": ("llama", {}),
    "mistral window": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}


def calibration(samples: int = 5, length: int = 24) -> CalibrationSet:
    generator = torch.Generator().manual_seed(11)
    return CalibrationSet(
        token_ids=torch.randint(3, 512, (samples, length), generator=generator),
        id="random",
        sha256="0" * 64,
        sources={},
        warnings=(),
    )


def collect(folder: Path, data: CalibrationSet, **more: Any) -> Any:
    return collect_statistics(
        CheckpointReader(folder), data, device=CPU, dtype=torch.float32, **more
    )


def recorded(model: Any, token_ids: Tensor) -> dict[tuple[int, str], Tensor]:
    """(layer, group) -> what the group's first linear reads, [tokens, K], in float64."""
    seen: dict[tuple[int, str], Tensor] = {}
    handles = []
    for layer, block in enumerate(model.model.layers):
        for group, name in FIRST_MEMBER.items():

            def keep(_: Any, inputs: Any, key: tuple[int, str] = (layer, group)) -> None:
                seen[key] = inputs[0].detach().flatten(0, 1).double()

            handles.append(block.get_submodule(name).register_forward_pre_hook(keep))
    with torch.no_grad():
        model(token_ids)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_statistics_equal_those_of_transformers_activations(
    family: str, tiny_model: TinyModel, reference_model: ReferenceModel
) -> None:
    arch, overrides = FAMILIES[family]
    folder, data = tiny_model(arch, **overrides), calibration()
    found = collect(folder, data)
    expected = recorded(reference_model(folder), data.token_ids)
    assert {(layer, name) for layer in found for name in found[layer]} == expected.keys()
    for (layer, name), x in expected.items():
        statistics = found[layer][name]
        gram = (x.T @ x / len(x)).float()
        assert statistics.num_tokens == len(x) == data.token_ids.numel()
        torch.testing.assert_close(
            statistics.second_moment, gram, rtol=1e-4, atol=1e-5 * float(gram.abs().max())
        )
        torch.testing.assert_close(statistics.mean_abs, x.abs().mean(0).float(), rtol=1e-4, atol=0)
        torch.testing.assert_close(statistics.absmax, x.abs().amax(0).float(), rtol=1e-4, atol=0)


def test_a_diagonal_is_the_gram_matrix_diagonal(tiny_model: TinyModel) -> None:
    folder, data = tiny_model(), calibration()
    whole, diagonal = collect(folder, data), collect(folder, data, diagonal=True)
    for layer, groups in whole.items():
        for name, statistics in groups.items():
            found = diagonal[layer][name]
            assert found.is_diagonal
            torch.testing.assert_close(found.second_moment, statistics.second_moment.diagonal())


def hidden_after_each_block(folder: Path, token_ids: Tensor, batch_tokens: int) -> list[Tensor]:
    reader = CheckpointReader(folder)
    arch, config = architecture_of(reader.config), load_config(reader.config)
    activations = Activations(
        token_ids,
        load_embedding(reader, arch, CPU, torch.float32),
        config,
        device=CPU,
        dtype=torch.float32,
        batch_tokens=batch_tokens,
    )
    states = [activations.hidden.clone()]
    for layer in range(config.num_layers):
        block = load_block(reader, config, arch, layer, device=CPU, dtype=torch.float32)
        activations.observe(block, Capture(arch.input_groups))
        assert torch.equal(activations.hidden, states[-1])
        activations.advance(block)
        states.append(activations.hidden.clone())
    return states


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch_tokens", [4096, 48, 1])
def test_hidden_states_equal_transformers_block_by_block(
    family: str, batch_tokens: int, tiny_model: TinyModel, reference_model: ReferenceModel
) -> None:
    arch, overrides = FAMILIES[family]
    folder, token_ids = tiny_model(arch, **overrides), calibration().token_ids
    ours = hidden_after_each_block(folder, token_ids, batch_tokens)
    model = reference_model(folder)
    expected: list[Tensor] = []
    handle = model.model.norm.register_forward_pre_hook(
        lambda _module, inputs: expected.append(inputs[0])
    )
    with torch.no_grad():
        states = list(model(token_ids, output_hidden_states=True).hidden_states)
    handle.remove()
    states[-1] = expected[0]  # transformers gives the last one after the final norm
    assert len(ours) == len(states)
    for own, state in zip(ours, states, strict=True):
        torch.testing.assert_close(own, state.flatten(0, 1), rtol=1e-4, atol=1e-4)


def test_a_sample_longer_than_the_model_allows_is_refused(tiny_model: TinyModel) -> None:
    with pytest.raises(CalibrationError, match=r"sequence_length 600 exceeds .* 512"):
        collect(tiny_model(), calibration(1, 600))


def test_token_ids_outside_the_vocabulary_are_refused(tiny_model: TinyModel) -> None:
    data = calibration()
    data.token_ids[2, 3] = 512
    with pytest.raises(CalibrationError, match=r"token id 512 .* vocab_size 512"):
        collect(tiny_model(), data)


def test_activations_that_overflow_name_their_layer_and_group(tiny_model: TinyModel) -> None:
    """Finite weights of layer 0 whose products are not finite in float32."""
    folder = tiny_model()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"] *= 1e38
    tensors["model.layers.0.mlp.up_proj.weight"] *= 1e4
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CalibrationError, match="group 'qkv' of layer 1"):
        collect(folder, calibration())


@pytest.mark.parametrize("batch_tokens", [24, 48, 4096])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_activations_that_are_not_finite_name_the_first_sample_and_token(
    value: float, batch_tokens: int, tiny_model: TinyModel
) -> None:
    folder, data = tiny_model(), calibration()
    reader = CheckpointReader(folder)
    arch, config = architecture_of(reader.config), load_config(reader.config)
    embedding = load_embedding(reader, arch, CPU, torch.float32)
    activations = Activations(
        data.token_ids, embedding, config, device=CPU, dtype=torch.float32,
        batch_tokens=batch_tokens,
    )  # fmt: skip
    activations.hidden[3 * 24 + 17, 5] = value
    activations.hidden[4 * 24 + 1, 6] = value
    block = load_block(reader, config, arch, 1, device=CPU, dtype=torch.float32)
    capture = Capture(arch.input_groups)
    activations.observe(block, capture)
    reason = r"'qkv' of layer 1, first in sample 3 \(token 17 of its 24\)"
    with pytest.raises(CalibrationError, match=reason):
        capture.results(1, activations.length)
    with pytest.raises(CalibrationError, match=r"first in token 89;"):
        capture.results(1)


def test_squares_that_overflow_name_the_sample_of_the_largest_value(tiny_model: TinyModel) -> None:
    reader = CheckpointReader(tiny_model())
    arch, config = architecture_of(reader.config), load_config(reader.config)
    block = load_block(reader, config, arch, 0, device=CPU, dtype=torch.float32)
    capture = Capture(arch.input_groups[:1])
    x = torch.ones(40, 64)
    x[33, 2], x[35, 0] = 3e20, 1e20
    with capture.watching(block):
        block.self_attn.q_proj(x)
    reason = r"as large as 3\.0e\+20 at the input of group 'qkv' of layer 0, in sample 3 .*squares"
    with pytest.raises(CalibrationError, match=reason):
        capture.results(0, 10)


def test_groups_without_a_token_have_no_statistics(tiny_model: TinyModel, tmp_path: Path) -> None:
    reader = CheckpointReader(tiny_model())
    arch, config = architecture_of(reader.config), load_config(reader.config)
    block = load_block(reader, config, arch, 0, device=CPU, dtype=torch.float32)
    capture = Capture(arch.input_groups)
    assert capture.results(0) == {}
    with capture.watching(block):
        block.self_attn.q_proj(torch.ones(3, 64))
        block.mlp.down_proj(torch.ones(0, 128))
    assert capture.results(0).keys() == {"qkv"}
    path = tmp_path / "s.safetensors"
    write(reader.folder, path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    counts = json.loads(metadata["num_tokens"]) | {"layers.1.down": 0}
    save_file(load_file(path), path, metadata | {"num_tokens": json.dumps(counts)})
    assert StatisticsFile(path).block(1, CPU).keys() == {"qkv", "o", "gate_up"}
    assert StatisticsFile(path).block(0, CPU).keys() == {"qkv", "o", "gate_up", "down"}


def write(folder: Path, path: Path, **more: Any) -> Any:
    data = calibration()
    layers = collect(folder, data, **more)
    save_statistics(path, layers, origin_of(CheckpointReader(folder), data, len(layers)))
    return layers


@pytest.mark.parametrize("diagonal", [False, True])
def test_a_statistics_file_gives_back_what_was_saved(
    diagonal: bool, tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder, path = tiny_model(), tmp_path / "s.safetensors"
    layers = write(folder, path, diagonal=diagonal)
    read = StatisticsFile(path).require_model(folder)
    assert read.origin.num_layers == 2
    assert read.origin.calibration_id == "random"
    assert (read.origin.num_samples, read.origin.sequence_length) == (5, 24)
    for layer, groups in layers.items():
        found = read.block(layer, CPU)
        assert found.keys() == groups.keys()
        for name, statistics in groups.items():
            assert found[name].num_tokens == statistics.num_tokens
            for field in ("second_moment", "mean_abs", "absmax"):
                assert torch.equal(getattr(found[name], field), getattr(statistics, field))
    assert [p.name for p in tmp_path.glob("*s.safetensors*")] == ["s.safetensors"]


def test_statistics_of_other_weights_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    write(tiny_model(), path)
    with pytest.raises(CalibrationError, match="whose weights are not those"):
        StatisticsFile(path).require_model(tiny_model(seed=1))


def test_a_layer_that_is_missing_is_named(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    write(tiny_model(), path)
    with pytest.raises(CalibrationError, match="no statistics of layer 2"):
        StatisticsFile(path).block(2, CPU)


def test_files_that_hold_no_statistics_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"missing\.safetensors"):
        StatisticsFile(tmp_path / "missing.safetensors")
    with pytest.raises(CalibrationError, match="no statistics file"):
        StatisticsFile(tiny_model() / "model.safetensors")
    noise = tmp_path / "noise.safetensors"
    noise.write_bytes(b"\x07" * 100)
    with pytest.raises(CalibrationError, match=r"noise\.safetensors"):
        StatisticsFile(noise)


def test_damaged_statistics_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    path, bad = tmp_path / "s.safetensors", tmp_path / "bad.safetensors"
    write(tiny_model(), path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    for key in ("origin", "num_tokens"):
        for value in (None, "{", '{"a": 1}' if key == "origin" else "[]"):
            changed = {k: v for k, v in metadata.items() if k != key}
            save_file(tensors, bad, changed if value is None else {**changed, key: value})
            with pytest.raises(CalibrationError, match=r"bad\.safetensors"):
                StatisticsFile(bad)
    tensors.pop("layers.1.down.absmax")
    save_file(tensors, bad, metadata)
    with pytest.raises(CalibrationError, match=r"bad\.safetensors.*layers\.1\.down\.absmax"):
        StatisticsFile(bad).block(1, CPU)
