"""Fixtures of the whole suite: tiny models, their oracle, no network, GPU tests skipped aloud."""

import importlib.util
import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

torch.set_num_threads(1)


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"oracles_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny() -> Any:
    """The module tests/oracles/tiny.py (tests are no package, so it cannot be imported)."""
    return _load(Path(__file__).parent / "oracles" / "tiny.py")


@pytest.fixture(scope="session")
def layouts() -> Any:
    """The module tests/oracles/layouts.py."""
    return _load(Path(__file__).parent / "oracles" / "layouts.py")


@pytest.fixture(scope="session")
def _tiny_models(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """As `tiny_model`, but each model is made once and must not be changed."""
    made: dict[str, Path] = {}

    def make(**arguments: Any) -> Path:
        key = repr(sorted(arguments.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("tiny") / "model"
            made[key] = tiny.save_tiny_model(folder, **arguments)
        return made[key]

    return make


@pytest.fixture
def tiny_model(_tiny_models: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """``tiny_model(arch="llama", dtype=torch.float32, **overrides)``: the test's own copy of a
    random two-layer model with a tokenizer, as a folder. See `save_tiny_model`."""
    count = 0

    def make(arch: str = "llama", dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
        nonlocal count
        count += 1
        target = tmp_path / "tiny" / f"{arch}-{count}"
        return shutil.copytree(_tiny_models(arch=arch, dtype=dtype, **overrides), target)

    return make


@pytest.fixture
def reference_model() -> Callable[..., Any]:
    """``reference_model(folder, dtype=torch.float32)``: transformers' model, the oracle.

    A quantized folder is decompressed by compressed-tensors while it is loaded: kept compressed,
    transformers 5.24 with compressed-tensors 0.20 makes asymmetric zero points of a wrong shape.
    """

    def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
        from transformers import AutoModelForCausalLM, CompressedTensorsConfig
        from transformers.utils import logging

        logging.disable_progress_bar()
        more = {}
        if "quantization_config" in json.loads((folder / "config.json").read_text()):
            more["quantization_config"] = CompressedTensorsConfig(dequantize=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You passed `quantization_config`")
            return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **more).eval()

    return load


@pytest.fixture
def quantized_model() -> Callable[[Path, Callable[[str], Any]], Path]:
    """``quantized_model(folder, scheme_of)``: a copy of a dense model, its blocks' linears
    rounded as ``scheme_of(layer)`` (a QuantScheme or None) says, in the format of the first."""

    def make(folder: Path, scheme_of: Callable[[str], Any]) -> Path:
        from quantforge.checkpoint.base import SchemeGroup, format_for
        from quantforge.checkpoint.reader import CheckpointReader
        from quantforge.checkpoint.writer import CheckpointWriter
        from quantforge.qtensor import quantize

        reader = CheckpointReader(folder)
        output = folder.with_name(f"{folder.name}-quantized")
        targets: dict[Any, list[str]] = {}
        with CheckpointWriter(output) as writer:
            for name in reader.names():
                layer = name.removesuffix(".weight")
                scheme = scheme_of(layer) if name.endswith("_proj.weight") else None
                if scheme is None:
                    writer.add(name, reader.tensor(name))
                    continue
                targets.setdefault(scheme, []).append(layer)
                qtensor = quantize(reader.tensor(name), scheme.weight)
                writer.add_linear(layer, qtensor, format_for(scheme))
            for path in (*folder.glob("tokenizer*"), folder / "generation_config.json"):
                writer.copy_file(path)
            groups = [SchemeGroup(targets=tuple(t), scheme=s) for s, t in targets.items()]
            layout = format_for(next(iter(targets)))
            section = layout.quantization_config(groups, ["lm_head"])
            writer.commit(reader.config | {"quantization_config": section})
        return output

    return make


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imported models go to the test's own folder, never to the user's cache."""
    monkeypatch.setenv("QUANTFORGE_CACHE", str(tmp_path / "quantforge-cache"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    count = sum("gpu" in report.keywords for report in skipped)
    if count:
        terminalreporter.write_line(f"{count} GPU tests were skipped: a skipped test is not passed")
