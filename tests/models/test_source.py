"""A MODEL argument leads to a folder, or to one line that says why not."""

import os
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from quantforge.errors import CheckpointError
from quantforge.models.source import cache_folder, resolve_model

REPOSITORY = (
    "config.json",
    "generation_config.json",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "chat_template.jinja",
    "pytorch_model.bin",
    "modeling_custom.py",
    "consolidated.safetensors",
    "onnx/model.safetensors",
    "original/params.json",
    "README.md",
)


def test_a_local_folder_is_taken_as_it_is(tmp_path):
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_gguf_is_imported_once_per_content(tiny_model, gguf_files, tmp_path):
    path = gguf_files.write_gguf(tmp_path / "m.gguf", tiny_model("llama"), arch="llama")
    folder = resolve_model(str(path))
    assert folder.is_relative_to(cache_folder())
    assert (folder / "model.safetensors").is_file()
    written = (folder / "config.json").stat().st_mtime_ns
    renamed = path.rename(tmp_path / "other.gguf")
    assert resolve_model(str(renamed)) == folder
    assert (folder / "config.json").stat().st_mtime_ns == written
    other = gguf_files.write_gguf(path, tiny_model("qwen2"), arch="qwen2")
    assert resolve_model(str(other)) != folder


def test_a_gguf_that_cannot_be_imported_leaves_no_folder_in_the_cache(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="truncated"):
        resolve_model(str(tmp_path / "m.gguf"))
    assert not list((cache_folder() / "gguf").glob("*"))


def test_the_cache_lies_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.delenv("QUANTFORGE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "quantforge"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "quantforge"


@pytest.mark.parametrize("model", ["./nothing", "/no/such/folder", "a/b/c", "nothing.gguf", "a b"])
def test_a_path_that_does_not_exist_is_named(model):
    with pytest.raises(CheckpointError, match=f"no file or folder {model}; MODEL is a local fold"):
        resolve_model(model)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"not a \.gguf file"):
        resolve_model(str(tmp_path / "model.bin"))


def test_offline_without_a_download_is_one_line():
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    with pytest.raises(CheckpointError, match="no local folder org/name, it was not") as caught:
        resolve_model("org/name")
    assert "\n" not in str(caught.value)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub that has one repository; the calls made of it."""
    calls = []

    def snapshot_download(repo_id, *, revision, allow_patterns, ignore_patterns):
        calls.append((repo_id, revision))
        files = filter_repo_objects(
            REPOSITORY, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        for name in files:
            (tmp_path / "hub" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "hub" / name).touch()
        return str(tmp_path / "hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_from_the_hub_come_safetensors_and_text_only(hub):
    folder = resolve_model("org/name", revision="v1")
    assert hub == [("org/name", "v1")]
    assert sorted(path.name for path in folder.iterdir()) == sorted(REPOSITORY[:7])


def test_a_repository_of_pickles_is_refused(hub, monkeypatch):
    monkeypatch.setattr(f"{__name__}.REPOSITORY", ("config.json", "pytorch_model.bin"))
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors files; pickled weights"):
        resolve_model("org/name")


def test_an_unknown_repository_is_one_line(monkeypatch):
    class Response:
        status_code, headers, request = 404, {}, None

    def snapshot_download(*arguments, **options):
        raise huggingface_hub.errors.RepositoryNotFoundError(
            "404 Client Error.\n\nRepository Not Found", response=Response()
        )

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError, match="no model org/nam on the Hugging") as caught:
        resolve_model("org/nam")
    assert "\n" not in str(caught.value)
