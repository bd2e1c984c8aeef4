"""Reading model folders: what comes out, and what each malformed input says."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantforge.checkpoint.reader import CheckpointReader
from quantforge.errors import CheckpointError, UnsupportedError
from quantforge.qtensor import QuantizedTensor
from quantforge.schemes import QuantScheme

MakeCheckpoint = Callable[..., Path]


def plain_folder(folder: Path, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config or {}))
    save_file({"a.weight": torch.arange(6.0).reshape(2, 3)}, folder / "model.safetensors")
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_tensors_equal_those_of_safetensors(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(max_shard_bytes=10_000)
    reader = CheckpointReader(folder)
    stored = {n: t for path in reader.weight_files() for n, t in load_file(path).items()}
    assert len(reader.weight_files()) > 1
    assert set(reader.names()) == set(stored)
    for name, tensor in stored.items():
        assert name in reader
        assert torch.equal(reader.tensor(name), tensor)
        assert reader.spec(name).shape == tuple(tensor.shape)
        assert reader.spec(name).dtype == tensor.dtype
    assert reader.num_weight_bytes() == sum(t.nbytes for t in stored.values())


def test_quantized_and_dense_linears_are_told_apart(
    make_checkpoint: MakeCheckpoint, scheme: QuantScheme
) -> None:
    reader = CheckpointReader(make_checkpoint())
    assert reader.format is not None
    assert reader.scheme("model.layers.0.mlp.down_proj") == scheme
    weight = reader.linear("model.layers.0.mlp.down_proj")
    assert isinstance(weight, QuantizedTensor)
    assert weight.shape == (64, 96)
    assert isinstance(reader.linear("lm_head"), torch.Tensor)
    assert not reader.is_quantized("lm_head")
    assert not reader.is_quantized("model.embed_tokens")


def test_an_unquantized_folder_has_no_format(make_checkpoint: MakeCheckpoint) -> None:
    reader = CheckpointReader(make_checkpoint(quantized=False))
    assert reader.format is None
    assert reader.layout is None
    assert isinstance(reader.linear("model.layers.0.mlp.down_proj"), torch.Tensor)


def test_hashes_are_the_files_sha256_and_progress_ends_at_the_total(
    make_checkpoint: MakeCheckpoint,
) -> None:
    folder = make_checkpoint(max_shard_bytes=10_000)
    seen: list[tuple[str, int, int]] = []
    hashes = CheckpointReader(folder).file_hashes(lambda *step: seen.append(step))
    expected = {p.name for p in folder.iterdir()} - {"quantforge.json"}
    assert set(hashes) == expected
    for name, digest in hashes.items():
        assert digest == hashlib.sha256((folder / name).read_bytes()).hexdigest()
    assert seen[-1][1] == seen[-1][2]


def test_a_linked_shard_is_read(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = make_checkpoint()
    blob = tmp_path / "blob"
    (folder / "model.safetensors").rename(blob)
    (folder / "model.safetensors").symlink_to(blob)
    assert CheckpointReader(folder).tensor("model.norm.weight").shape == (64,)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        CheckpointReader(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "config.json does not exist"),
        ("{", "config.json is not valid JSON"),
        ("[1]", "config.json holds a list"),
        ("\udcff", "config.json is not valid JSON"),
        ("[" * 100_000, "config.json is not valid JSON"),
    ],
    ids=["missing", "cut", "list", "not UTF-8", "deep"],
)
def test_a_bad_config_is_named(tmp_path: Path, text: str | None, says: str) -> None:
    folder = plain_folder(tmp_path / "m")
    path = folder / "config.json"
    path.unlink()
    if text is not None:
        path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=says):
        CheckpointReader(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_named(make_checkpoint: MakeCheckpoint, keep: int) -> None:
    path = make_checkpoint() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no whole safetensors file"):
        CheckpointReader(path.parent)


def test_trailing_bytes_are_refused(make_checkpoint: MakeCheckpoint) -> None:
    path = make_checkpoint() / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no whole"):
        CheckpointReader(path.parent)


def test_a_missing_shard_is_named(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(max_shard_bytes=10_000)
    victim = sorted(folder.glob("model-*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(CheckpointError, match=victim.name):
        CheckpointReader(folder)


@pytest.mark.parametrize(
    "place",
    ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "x.bin", 3, "a\\b"],
)
def test_an_index_that_points_elsewhere_is_refused(tmp_path: Path, place: Any) -> None:
    folder = plain_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    index = {"weight_map": {"a.weight": place}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"a\.weight.*plain name"):
        CheckpointReader(folder)


@pytest.mark.parametrize("document", [{}, {"weight_map": {}}, {"weight_map": [1]}, [1]])
def test_an_index_without_a_map_is_refused(tmp_path: Path, document: Any) -> None:
    folder = plain_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"index\.json"):
        CheckpointReader(folder)


def test_a_tensor_that_the_index_misplaces_is_named(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(max_shard_bytes=10_000)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["ghost.weight"] = next(iter(index["weight_map"].values()))
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lacks tensor ghost\.weight"):
        CheckpointReader(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_with_the_way_out(tmp_path: Path, name: str) -> None:
    folder = plain_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(CheckpointError, match=r"pickle.*save_pretrained"):
        CheckpointReader(folder)


def test_a_folder_without_weights_says_what_is_expected(tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        CheckpointReader(folder)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    reader = CheckpointReader(plain_folder(tmp_path / "m"))
    for ask in (reader.tensor, reader.spec):
        with pytest.raises(CheckpointError, match=r"tensor b\.weight is missing"):
            ask("b.weight")


def test_a_target_that_is_dense_is_named(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(quantized=False)
    donor = json.loads((make_checkpoint("donor") / "config.json").read_text())
    change_config(folder, quantization_config=donor["quantization_config"])
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.down_proj \(int4-g32-asym"):
        CheckpointReader(folder).linear("model.layers.0.mlp.down_proj")


def test_a_foreign_quantization_is_unsupported(tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "hqq", "bits": 4}}
    with pytest.raises(UnsupportedError, match="'hqq'"):
        CheckpointReader(plain_folder(tmp_path / "m", config))


def test_a_quantization_config_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "m", {"quantization_config": "w4a16"})
    with pytest.raises(CheckpointError, match=r"config\.json: quantization_config"):
        CheckpointReader(folder)


def test_an_unknown_dtype_is_named(tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "m")
    save_file({"z": torch.zeros(2, dtype=torch.complex64)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="tensor z has dtype C64"):
        CheckpointReader(folder)


def test_hidden_float8_bytes_survive(tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "m")
    values = torch.arange(16).to(torch.float8_e4m3fn)
    save_file({"f": values}, folder / "model.safetensors")
    assert torch.equal(
        CheckpointReader(folder).tensor("f").view(torch.uint8), values.view(torch.uint8)
    )
