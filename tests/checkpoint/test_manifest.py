"""Provenance: quantforge.json written, read and added to."""

import dataclasses
import json
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from quantforge.checkpoint.manifest import (
    MANIFEST_FILE,
    Manifest,
    append_evaluation,
    provenance_versions,
    read_manifest,
    write_manifest,
)
from quantforge.errors import CheckpointError

MANIFEST = Manifest(
    versions=provenance_versions(),
    source={"name": "smollm2", "hashes": {"model.safetensors": "00"}},
    recipe={"quantize": {"method": "awq"}},
    scheme="int4-g64-asym",
    method="awq",
    seed=3,
    calibration={"id": "bundled", "sha256": "11", "num_samples": 2, "sequence_length": 8},
    layers=({"name": "a", "scheme": "int4-g64-asym", "weight_error": 0.1, "output_error": None},),
    files={"config.json": "22"},
)


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    assert read_manifest(tmp_path) == MANIFEST
    assert [p.name for p in tmp_path.iterdir()] == [MANIFEST_FILE]


def test_a_folder_without_manifest_has_none_and_gets_none(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    assert append_evaluation(tmp_path, {"ppl": 1.0}) is False
    assert list(tmp_path.iterdir()) == []


def test_evaluations_follow_in_order_and_change_nothing_else(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    for ppl in (10.0, 11.0):
        assert append_evaluation(tmp_path, {"kind": "ppl", "ppl": ppl}) is True
    read = read_manifest(tmp_path)
    assert read is not None
    assert [entry["ppl"] for entry in read.evaluations] == [10.0, 11.0]
    assert dataclasses.replace(read, evaluations=()) == MANIFEST


def test_evaluations_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: append_evaluation(tmp_path, {"i": i}), range(16)))
    read = read_manifest(tmp_path)
    assert read is not None
    assert sorted(entry["i"] for entry in read.evaluations) == list(range(16))


def test_numbers_that_json_lacks_become_words(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    append_evaluation(tmp_path, {"ppl": float("inf"), "kl": [float("nan")]})
    text = (tmp_path / MANIFEST_FILE).read_text()
    read = json.loads(text, parse_constant=lambda word: pytest.fail(word))
    assert read["evaluations"][0]["ppl"] == "inf"
    assert read["evaluations"][0]["kl"] == ["nan"]


def test_versions_are_those_that_run() -> None:
    found = provenance_versions()
    assert found["torch"] == torch.__version__
    assert found["python"] == platform.python_version()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d | {"format_version": 99}, "format_version is 99"),
        (lambda d: d | {"layers": {}}, "layers is a dict"),
        (lambda d: d | {"seed": "x"}, "seed is a str"),
        (lambda d: {k: v for k, v in d.items() if k != "files"}, "'files' is missing"),
        (lambda d: [d], "holds a list"),
    ],
)
def test_a_malformed_manifest_says_what_is_wrong(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], says: str
) -> None:
    path = write_manifest(tmp_path, MANIFEST)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(CheckpointError, match=says):
        read_manifest(tmp_path)
