"""An imported GGUF is the model that it was made from, or it is refused."""

import json
import re

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quantization
from safetensors.torch import load_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quantforge.cli.app import run
from quantforge.errors import CheckpointError, UnsupportedError, UsageError
from quantforge.models.gguf_import import import_gguf, unpermute_rows

IDS = torch.arange(40).remainder(37).reshape(1, 40) + 3


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids).logits


def relative_error(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(
    ("arch", "overrides"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"num_key_value_heads": 4, "rope_theta": 250000.0}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
    ],
)
def test_an_imported_model_gives_the_same_logits(
    tiny_model, reference_model, gguf_files, tmp_path, arch, overrides
):
    source = tiny_model(arch, **overrides)
    path = gguf_files.write_gguf(tmp_path / "m.gguf", source, arch=arch)
    folder = import_gguf(path, tmp_path / "out")
    ours, original = reference_model(folder), reference_model(source)
    assert type(ours) is type(original)
    assert torch.equal(logits(ours), logits(original))


def test_llama3_rope_scaling_is_found_again(tiny_model, reference_model, gguf_files, tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    source = tiny_model(rope_parameters={**scaling, "rope_theta": 500000.0})
    original = reference_model(source)
    scaled = ROPE_INIT_FUNCTIONS["llama3"](original.config, "cpu")[0]
    plain = 500000.0 ** -(torch.arange(0, 16, 2) / 16)
    extra = {"rope_freqs.weight": (plain / scaled).numpy()}
    path = gguf_files.write_gguf(tmp_path / "m.gguf", source, arch="llama", extra=extra)
    folder = import_gguf(path, tmp_path / "out")
    assert json.loads((folder / "config.json").read_text())["rope_scaling"] == scaling
    assert relative_error(logits(reference_model(folder)), logits(original)) < 1e-5


@pytest.mark.parametrize(
    ("scaling", "metadata"),
    [
        (
            {"rope_type": "linear", "factor": 4.0},
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
                "rope.scaling.attn_factor": 1.0,
            },
        ),
    ],
)
def test_rope_scaling_of_the_metadata_gives_the_same_logits(
    tiny_model, reference_model, gguf_files, tmp_path, scaling, metadata
):
    source = tiny_model("qwen2", rope_parameters={**scaling, "rope_theta": 10000.0})
    path = gguf_files.write_gguf(
        tmp_path / "m.gguf",
        source,
        arch="qwen2",
        metadata={f"qwen2.{name}": value for name, value in metadata.items()},
    )
    folder = import_gguf(path, tmp_path / "out")
    assert torch.equal(logits(reference_model(folder)), logits(reference_model(source)))


@pytest.mark.parametrize("kind", [Quantization.Q4_0, Quantization.Q4_1, Quantization.Q8_0])
def test_quantized_tensors_equal_ggufs_own_dequantization(tiny_model, gguf_files, tmp_path, kind):
    source = tiny_model("llama")
    path = gguf_files.write_gguf(tmp_path / "m.gguf", source, arch="llama", quantization=kind)
    imported = load_file(import_gguf(path, tmp_path / "out") / "model.safetensors")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, theirs in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
        "model.layers.1.self_attn.v_proj.weight": "blk.1.attn_v.weight",
    }.items():
        expected = gguf.dequantize(stored[theirs].data, kind)
        assert imported[name].dtype == torch.float32
        assert np.array_equal(imported[name].numpy(), expected)
    q = stored["blk.0.attn_q.weight"]
    permuted = gguf_files.permute(imported["model.layers.0.self_attn.q_proj.weight"].numpy(), 4)
    assert np.array_equal(permuted, gguf.dequantize(q.data, kind))


@pytest.mark.parametrize("heads", [1, 3, 4])
def test_unpermuting_undoes_what_the_converter_does(gguf_files, heads):
    rows = np.arange(heads * 8 * 5, dtype=np.float32).reshape(heads * 8, 5)
    permuted = torch.from_numpy(gguf_files.permute(rows, heads))
    assert torch.equal(unpermute_rows(permuted, heads), torch.from_numpy(rows))


@pytest.mark.parametrize(
    ("stored", "name", "expected"),
    [
        (Quantization.F16, "auto", torch.float16),
        (Quantization.BF16, "auto", torch.bfloat16),
        (Quantization.F32, "auto", torch.float32),
        (Quantization.Q8_0, "auto", torch.float32),
        (Quantization.F32, "bfloat16", torch.bfloat16),
    ],
)
def test_auto_keeps_the_files_precision(tiny_model, gguf_files, tmp_path, stored, name, expected):
    source = tiny_model("llama")
    path = gguf_files.write_gguf(tmp_path / "m.gguf", source, arch="llama", quantization=stored)
    folder = import_gguf(path, tmp_path / "out", dtype=name)
    tensors = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {expected}
    config = json.loads((folder / "config.json").read_text())
    assert config["torch_dtype"] == str(expected).removeprefix("torch.")


@pytest.mark.parametrize(
    ("arch", "options", "error", "message"),
    [
        ("gemma", {}, UnsupportedError, "'gemma'; GGUF import knows llama, qwen2, qwen3"),
        ("llama", {"pre": "tekken"}, UnsupportedError, "'tekken'; GGUF import knows gpt-2, smoll"),
        ("llama", {"metadata": {"split.count": 2}}, UnsupportedError, "one part of several"),
        ("llama", {"metadata": {"llama.expert_count": 8}}, UnsupportedError, "mixture of experts"),
        (
            "llama",
            {"metadata": {"llama.rope.dimension_count": 8}},
            UnsupportedError,
            "only heads that are 16 long",
        ),
        (
            "llama",
            {"metadata": {"llama.rope.scaling.type": "longrope"}},
            UnsupportedError,
            "rope scaling 'longrope'",
        ),
        (
            "llama",
            {"extra": {"rope_freqs.weight": np.full(8, 3.0)}},
            UnsupportedError,
            "not Llama 3's",
        ),
        ("llama", {"extra": {"blk.0.x.weight": np.ones(3)}}, UnsupportedError, "blk.0.x.weight"),
        (
            "llama",
            {"extra": {"blk.0.attn_norm.weight": np.full(64, np.nan)}},
            CheckpointError,
            "blk.0.attn_norm.weight of .* holds NaN",
        ),
        (
            "llama",
            {"extra": {"blk.1.ffn_up.weight": np.ones((64, 64))}},
            CheckpointError,
            r"blk.1.ffn_up.weight of .* has shape \(64, 64\)",
        ),
        ("qwen2", {"arch": "qwen3"}, CheckpointError, "lacks the tensor blk.0.attn_q_norm.weight"),
        (
            "llama",
            {"metadata": {"tokenizer.ggml.eot_token_id": 600}},
            CheckpointError,
            "the eot token is 600, beyond the 512 tokens",
        ),
    ],
)
def test_a_file_that_cannot_be_imported_is_refused_and_leaves_nothing(
    tiny_model, gguf_files, tmp_path, arch, options, error, message
):
    source = tiny_model("llama" if arch == "gemma" else arch)
    path = gguf_files.write_gguf(tmp_path / "m.gguf", source, **{"arch": arch, **options})
    with pytest.raises(error, match=message):
        import_gguf(path, tmp_path / "new" / "out")
    assert not list(tmp_path.glob("new/*"))


def test_a_value_beyond_float16_is_refused_rather_than_made_infinite(
    tiny_model, gguf_files, tmp_path
):
    extra = {"output_norm.weight": np.full(64, 1e6)}
    path = gguf_files.write_gguf(
        tmp_path / "m.gguf", tiny_model("llama"), arch="llama", extra=extra
    )
    with pytest.raises(CheckpointError, match=r"output_norm.weight .* in torch.float16"):
        import_gguf(path, tmp_path / "out", dtype="float16")


def test_an_unknown_dtype_is_refused(tiny_model, gguf_files, tmp_path):
    path = gguf_files.write_gguf(tmp_path / "m.gguf", tiny_model("llama"), arch="llama")
    with pytest.raises(UsageError, match="unknown dtype 'int8'; use auto, float32"):
        import_gguf(path, tmp_path / "out", dtype="int8")


def test_a_truncated_file_is_refused_wherever_it_ends(tiny_model, gguf_files, tmp_path):
    path = gguf_files.write_gguf(tmp_path / "m.gguf", tiny_model("llama"), arch="llama")
    whole = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, 400, 3), *range(400, len(whole), len(whole) // 80), len(whole) - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=re.escape(str(cut))):
            import_gguf(cut, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_imports_and_prints_one_document(tiny_model, gguf_files, tmp_path, capsys):
    path = gguf_files.write_gguf(tmp_path / "m.gguf", tiny_model("llama"), arch="llama")
    arguments = ["import", str(path), "--output", str(tmp_path / "out"), "--json"]
    assert run(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["architecture"] == "LlamaForCausalLM"
    assert (tmp_path / "out" / "model.safetensors").stat().st_size == document["num_weight_bytes"]
    before = (tmp_path / "out" / "config.json").stat().st_mtime_ns
    assert run(arguments) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (tmp_path / "out" / "config.json").stat().st_mtime_ns == before
    assert run([*arguments, "--overwrite"]) == 0


def test_the_command_says_in_one_line_that_a_file_is_no_gguf(tmp_path, capsys):
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04 something else")
    assert run(["import", str(tmp_path / "x.gguf"), "-o", str(tmp_path / "out")]) == 5
    assert run(["import", str(tmp_path / "none.gguf"), "-o", str(tmp_path / "out")]) == 5
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("error: ") for line in lines)
