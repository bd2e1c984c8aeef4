"""GGUF files are read as the gguf package reads them, and damaged ones are refused."""

import random

import gguf
import numpy as np
import pytest
import torch

from quantforge.errors import QuantForgeError
from quantforge.models import gguf_file
from quantforge.models.gguf_file import GGUFFile


@pytest.mark.parametrize("kind", sorted(gguf.quants._type_traits, key=lambda kind: kind.name))
def test_every_block_type_is_read_as_gguf_reads_it(tmp_path, monkeypatch, kind):
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    columns = 512 // block * block_bytes
    data = np.random.default_rng(0).integers(0, 120, (7, columns), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("x", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr(gguf_file, "DEQUANTIZE_ELEMENTS", 1024)  # two rows at a time
    with GGUFFile(tmp_path / "m.gguf") as file:
        actual = file.tensor("x", torch.float32)
    assert actual.shape == (7, 512)
    assert np.array_equal(actual.numpy(), gguf.dequantize(data, kind), equal_nan=True)


def test_metadata_is_read_as_the_gguf_package_reads_it(tiny_model, gguf_files, tmp_path):
    path = gguf_files.write_gguf(tmp_path / "m.gguf", tiny_model("qwen2"), arch="qwen2")
    theirs = {k: f.contents() for k, f in gguf.GGUFReader(path).fields.items()}
    with GGUFFile(path) as file:
        assert file.metadata == {k: v for k, v in theirs.items() if not k.startswith("GGUF.")}


def test_a_damaged_header_never_ends_in_anything_but_our_errors(tiny_model, gguf_files, tmp_path):
    path = gguf_files.write_gguf(tmp_path / "m.gguf", tiny_model("llama"), arch="llama")
    whole = path.read_bytes()
    rng = random.Random(0)
    damaged = tmp_path / "damaged.gguf"
    refused = 0
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 8))):
            data[rng.randrange(4, 900)] = rng.randrange(256)
        damaged.write_bytes(data)
        try:
            GGUFFile(damaged).close()
        except QuantForgeError:
            refused += 1
    assert refused > 20
