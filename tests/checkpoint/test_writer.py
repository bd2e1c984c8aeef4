"""Writing model folders: whole or not at all, aligned, sharded, and readable by others."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from quantforge.checkpoint.base import SchemeGroup, format_for
from quantforge.checkpoint.reader import CheckpointReader
from quantforge.checkpoint.shard import DTYPES, HEADER_BYTES, Shard
from quantforge.checkpoint.writer import CheckpointWriter
from quantforge.errors import CheckpointError, UsageError
from quantforge.qtensor import QuantizedTensor, quantize
from quantforge.schemes import preset, with_group_size

MakeCheckpoint = Callable[..., Path]


def write(
    output: Path,
    value: float = 1.0,
    *,
    size: int = 4,
    check: Callable[[Path], None] | None = None,
    **options: Any,
) -> Path:
    with CheckpointWriter(output, **options) as writer:
        writer.add("a.weight", torch.full((size, size), value))
        return writer.commit({"value": value}, check=check)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_was_added_is_what_safetensors_reads(tmp_path: Path) -> None:
    added = {
        f"{name.lower()}.{tuple(shape)}": torch.randint(0, 2, shape).to(dtype)
        for name, dtype in DTYPES.items()
        for shape in ((3, 5), (1,), (), (0, 4), (7, 1, 3))
    }
    with CheckpointWriter(tmp_path / "m") as writer:
        for name, tensor in added.items():
            writer.add(name, tensor)
        folder = writer.commit({})
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == added.keys()
    for name, tensor in added.items():
        assert stored[name].dtype == tensor.dtype
        assert stored[name].shape == tensor.shape
        raw = [t.reshape(-1).view(torch.uint8) for t in (stored[name], tensor)]
        assert torch.equal(*raw)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(DTYPES)), st.integers(0, 40)), min_size=1, max_size=20
    )
)
def test_every_tensor_is_aligned_to_its_items(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[str, int]]
) -> None:
    path = tmp_path_factory.mktemp("aligned") / "shard"
    shard = Shard(path)
    for i, (name, size) in enumerate(parts):
        shard.add(f"t{i}", torch.zeros(size, dtype=DTYPES[name]))
    shard.close()
    header = json.loads(path.read_bytes()[8 : 8 + HEADER_BYTES])
    for i, (name, _) in enumerate(parts):
        assert header[f"t{i}"]["data_offsets"][0] % DTYPES[name].itemsize == 0
    assert len(load_file(path)) == len(parts)


def test_strided_and_shared_tensors_are_written_by_value(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    odd = torch.zeros(3, dtype=torch.int8)
    with CheckpointWriter(tmp_path / "m") as writer:
        writer.add("transposed", base.T)
        writer.add("row", base[1])
        writer.add("odd", odd)
        odd.fill_(9)
        folder = writer.commit({})
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(stored["transposed"], base.T)
    assert torch.equal(stored["row"], base[1])
    assert stored["odd"].tolist() == [0, 0, 0]


def test_shards_stay_below_the_limit_and_the_index_is_complete(tmp_path: Path) -> None:
    sizes = [100, 300, 500, 2000, 10, 10, 10]
    with CheckpointWriter(tmp_path / "m", max_shard_bytes=1000) as writer:
        for i, size in enumerate(sizes):
            writer.add(f"t{i}", torch.full((size,), i, dtype=torch.uint8))
        folder = writer.commit({})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(folder.glob("*.safetensors"))
    assert [p.name for p in shards] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert set(index["weight_map"].values()) == {p.name for p in shards}
    assert index["metadata"]["total_size"] == sum(sizes)
    for path in shards:
        held = load_file(path)
        assert len(held) == 1 or sum(t.nbytes for t in held.values()) <= 1000
        assert all(index["weight_map"][name] == path.name for name in held)
    reader = CheckpointReader(folder)
    assert [reader.tensor(f"t{i}").numel() for i in range(len(sizes))] == sizes


def test_a_full_header_starts_a_new_shard(tmp_path: Path) -> None:
    names = [f"{'x' * 2000}.{i}" for i in range(300)]
    with CheckpointWriter(tmp_path / "m") as writer:
        for name in names:
            writer.add(name, torch.zeros(2))
        folder = writer.commit({})
    reader = CheckpointReader(folder)
    assert len(reader.weight_files()) == 3
    assert set(reader.names()) == set(names)


def test_the_metadata_names_the_framework(tmp_path: Path) -> None:
    with safe_open(write(tmp_path / "m") / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_transformers_loads_what_was_written(
    tiny_model: Callable[..., Path], reference_model: Callable[..., Any], tmp_path: Path
) -> None:
    """Quantized by us, opened and decompressed by transformers: the same weights."""
    source = CheckpointReader(tiny_model())
    scheme = with_group_size(preset("w4a16"), 32)
    layout = format_for(scheme)
    group = SchemeGroup(targets=("Linear",), scheme=scheme)
    config = source.config | {
        "quantization_config": layout.quantization_config([group], ["lm_head"])
    }
    with CheckpointWriter(tmp_path / "q", max_shard_bytes=50_000) as writer:
        for name in source.names():
            tensor = source.tensor(name)
            if name.endswith("_proj.weight"):
                layer = name.removesuffix(".weight")
                writer.add_linear(layer, quantize(tensor, scheme.weight), layout)
            else:
                writer.add(name, tensor)
        for path in source.side_files():
            writer.copy_file(path)
        folder = writer.commit(config)
    ours = CheckpointReader(folder)
    theirs = reference_model(folder)
    for name, module in theirs.named_modules():
        if name.endswith("_proj"):
            weight = ours.linear(name)
            assert isinstance(weight, QuantizedTensor)
            identity = torch.eye(weight.shape[1])
            assert torch.equal(module(identity).T, weight.dequantize())


def test_nothing_appears_before_commit_and_only_the_output_after(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "m") as writer:
        writer.add("a", torch.zeros(3))
        assert not (tmp_path / "m").exists()
        writer.commit({"b": 1})
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    assert sorted(contents(tmp_path / "m")) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def fail(folder: Path) -> None:
        raise error

    with pytest.raises(error):
        write(tmp_path / "m", check=fail)
    assert list(tmp_path.iterdir()) == []


def test_leaving_without_commit_leaves_nothing(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "m") as writer:
        writer.add("a", torch.zeros(3))
    assert list(tmp_path.iterdir()) == []


def test_a_failed_check_keeps_the_old_output(tmp_path: Path) -> None:
    before = contents(write(tmp_path / "m", 1.0))

    def refuse(folder: Path) -> None:
        assert CheckpointReader(folder).tensor("a.weight")[0, 0] == 2.0
        raise CheckpointError("not good")

    with pytest.raises(CheckpointError, match="not good"):
        write(tmp_path / "m", 2.0, overwrite=True, check=refuse)
    assert contents(tmp_path / "m") == before
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_an_existing_output_is_refused_at_once_and_untouched(tmp_path: Path) -> None:
    before = contents(write(tmp_path / "m"))
    with pytest.raises(UsageError, match=r"m exists; use --overwrite"):
        CheckpointWriter(tmp_path / "m")
    assert contents(tmp_path / "m") == before
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_overwrite_replaces_the_whole_folder(tmp_path: Path) -> None:
    write(tmp_path / "m")
    (tmp_path / "m" / "left.txt").write_text("over")
    write(tmp_path / "m", 2.0, overwrite=True)
    assert sorted(contents(tmp_path / "m")) == ["config.json", "model.safetensors"]
    assert CheckpointReader(tmp_path / "m").tensor("a.weight")[0, 0] == 2.0
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_overwrite_replaces_only_model_folders(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("dear")
    with pytest.raises(UsageError, match="no model folder"):
        CheckpointWriter(tmp_path / "notes", overwrite=True)
    with pytest.raises(UsageError, match="no folder"):
        CheckpointWriter(tmp_path / "notes" / "diary.txt", overwrite=True)
    assert (tmp_path / "notes" / "diary.txt").read_text() == "dear"


def test_the_source_is_never_an_output(tmp_path: Path) -> None:
    source = write(tmp_path / "parent" / "model")
    (tmp_path / "parent" / "config.json").write_text("{}")
    (tmp_path / "alias").symlink_to(source)
    for output in (source, tmp_path / "parent", tmp_path / "alias", source / ".." / "model"):
        with pytest.raises(UsageError, match="is or contains the source"):
            CheckpointWriter(output, overwrite=True, source=source)
    write(source / "inside", source=source)


def test_an_output_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    def finish_first(folder: Path) -> None:
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "other").write_text("first")

    with pytest.raises(UsageError, match="appeared while"):
        write(tmp_path / "m", check=finish_first)
    assert list(contents(tmp_path / "m")) == ["other"]
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_disk_known_to_be_too_small_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"GB free; the output needs"):
        CheckpointWriter(tmp_path / "m", expected_bytes=10**18)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_gives_one_line_and_leaves_the_old_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(write(tmp_path / "m"))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*m: No space left on device"):
        write(tmp_path / "m", 2.0, overwrite=True)
    assert contents(tmp_path / "m") == before
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_file_size_limit_is_an_error_of_the_disk(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (HEADER_BYTES + 5000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write .*m: File too large"):
            write(tmp_path / "m", size=300)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


KILLED = """
import sys, time, torch
from pathlib import Path
from quantforge.checkpoint.writer import CheckpointWriter
with CheckpointWriter(Path(sys.argv[1]), overwrite=True) as writer:
    writer.add("a", torch.zeros(1000))
    print("writing", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def writing(tmp_path: Path) -> Any:
    """A process in the middle of writing to ``m``; killed at the end of the test."""
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "m")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_killed_writer_leaves_no_output_and_the_next_run_sweeps(
    tmp_path: Path, writing: subprocess.Popen[str]
) -> None:
    writing.send_signal(signal.SIGKILL)
    writing.wait()
    assert not (tmp_path / "m").exists()
    assert all(p.name.startswith(".m.partial-") for p in tmp_path.iterdir())
    write(tmp_path / "m")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_writer_that_lives_is_not_swept(tmp_path: Path, writing: subprocess.Popen[str]) -> None:
    write(tmp_path / "m")
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"m", f".m.partial-{writing.pid}"}


def test_an_output_that_a_killed_overwrite_moved_aside_comes_back(tmp_path: Path) -> None:
    write(tmp_path / "m", 5.0)
    (tmp_path / "m").rename(tmp_path / ".m.old-1")
    with pytest.raises(UsageError, match="m exists"):
        CheckpointWriter(tmp_path / "m")
    assert CheckpointReader(tmp_path / "m").tensor("a.weight")[0, 0] == 5.0


def test_names_with_glob_characters_sweep_only_their_own(tmp_path: Path) -> None:
    (tmp_path / ".model.partial-1").mkdir()
    write(tmp_path / "m*[x]?")
    assert {p.name for p in tmp_path.iterdir()} == {".model.partial-1", "m*[x]?"}


def test_copied_files_are_whole_even_through_links(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("text")
    (tmp_path / "tokenizer.json").symlink_to(tmp_path / "blob")
    with CheckpointWriter(tmp_path / "m") as writer:
        writer.add("a", torch.zeros(3))
        writer.copy_file(tmp_path / "tokenizer.json")
        folder = writer.commit({})
    assert not (folder / "tokenizer.json").is_symlink()
    assert (folder / "tokenizer.json").read_text() == "text"


def test_a_name_may_be_added_once_and_an_empty_model_is_refused(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "m") as writer:
        with pytest.raises(CheckpointError, match="no tensor"):
            writer.commit({})
        writer.add("a", torch.zeros(3))
        with pytest.raises(CheckpointError, match="tensor a was added twice"):
            writer.add("a", torch.zeros(3))
        with pytest.raises(CheckpointError, match="complex64"):
            writer.add("c", torch.zeros(3, dtype=torch.complex64))
