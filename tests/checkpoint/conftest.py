"""A small quantized checkpoint of random weights, made without transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantforge.checkpoint.base import SchemeGroup, format_for
from quantforge.checkpoint.manifest import Manifest, provenance_versions
from quantforge.checkpoint.writer import CheckpointWriter
from quantforge.qtensor import quantize
from quantforge.schemes import QuantScheme, preset, with_group_size

HIDDEN, MLP, VOCAB, BLOCKS = 64, 96, 40, 2
SHAPES = {"self_attn.q_proj": (HIDDEN, HIDDEN), "mlp.down_proj": (HIDDEN, MLP)}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": BLOCKS,
    "tie_word_embeddings": False,
}


@pytest.fixture
def scheme() -> QuantScheme:
    return with_group_size(preset("w4a16"), 32)


def linears() -> list[str]:
    return [f"model.layers.{i}.{name}" for i in range(BLOCKS) for name in SHAPES]


@pytest.fixture
def make_checkpoint(tmp_path: Path, scheme: QuantScheme) -> Callable[..., Path]:
    """``make_checkpoint(name="model", quantized=True, max_shard_bytes=...)``: a whole folder."""

    def make(name: str = "model", *, quantized: bool = True, **options: Any) -> Path:
        torch.manual_seed(0)
        layout = format_for(scheme)
        config = dict(CONFIG)
        if quantized:
            group = SchemeGroup(targets=("Linear",), scheme=scheme)
            config["quantization_config"] = layout.quantization_config([group], ["lm_head"])
        with CheckpointWriter(tmp_path / name, **options) as writer:
            writer.add("model.embed_tokens.weight", torch.randn(VOCAB, HIDDEN))
            for layer in linears():
                weight = torch.randn(SHAPES[layer.split(".", 3)[3]])
                done = quantize(weight, scheme.weight) if quantized else weight
                writer.add_linear(layer, done, layout)
            for i in range(BLOCKS):
                writer.add(f"model.layers.{i}.input_layernorm.weight", torch.ones(HIDDEN))
            writer.add("model.norm.weight", torch.ones(HIDDEN))
            writer.add("lm_head.weight", torch.randn(VOCAB, HIDDEN))
            writer.add_bytes("tokenizer.json", b"{}")
            manifest = Manifest(
                versions=provenance_versions(),
                source={"name": "random"},
                recipe={},
                scheme=str(scheme),
                method="rtn",
                seed=0,
                layers=tuple({"name": n, "scheme": str(scheme)} for n in linears()),
            )
            return writer.commit(config, manifest=manifest)

    return make
