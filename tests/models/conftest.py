"""Fixtures of the model tests beyond those of the whole suite."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def gguf_files() -> Any:
    """The module tests/oracles/gguf_files.py, which writes GGUF files."""
    path = Path(__file__).parents[1] / "oracles" / "gguf_files.py"
    spec = importlib.util.spec_from_file_location("oracles_gguf_files", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
