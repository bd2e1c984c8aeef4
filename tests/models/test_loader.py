"""Loading: merged or apart, whole or cut for ranks, dense or quantized."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quantforge.checkpoint.reader import CheckpointReader
from quantforge.errors import UsageError
from quantforge.models.attention import CausalAttention
from quantforge.models.decoder import MLP, Attention, Decoder, DecoderBlock
from quantforge.models.loader import (
    architecture_of,
    load_block,
    load_config,
    load_decoder,
    load_embedding,
    load_head,
)
from quantforge.schemes import QuantScheme, TensorQuant

INT4_GROUP = QuantScheme(
    weight=TensorQuant(num_bits=4, symmetric=False, granularity="group", group_size=32)
)
INT4_WIDE = QuantScheme(weight=TensorQuant(num_bits=4, granularity="group", group_size=64))
INT8_CHANNEL = QuantScheme(weight=TensorQuant(num_bits=8, granularity="channel"))

TinyModel = Callable[..., Path]
QuantizedModel = Callable[[Path, Callable[[str], QuantScheme | None]], Path]


def load(folder: Path, **arguments: Any) -> Decoder:
    settings: dict[str, Any] = {"device": "cpu", "dtype": torch.float32} | arguments
    return load_decoder(CheckpointReader(folder), **settings)


@torch.inference_mode()
def logits(decoder: Decoder) -> Tensor:
    ids = torch.randint(3, 512, (30,), generator=torch.Generator().manual_seed(1))
    return decoder.logits(decoder(ids, torch.arange(30), CausalAttention(decoder.config, 1)))


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def block_at(decoder: Decoder, layer: int) -> DecoderBlock:
    block = decoder.layers[layer]
    assert isinstance(block, DecoderBlock)
    return block


@pytest.mark.parametrize("scheme", [INT4_GROUP, INT4_WIDE, INT8_CHANNEL], ids=str)
@pytest.mark.parametrize("merge", [True, False], ids=["merged", "apart"])
def test_quantized_logits_equal_transformers_with_compressed_tensors(
    scheme: QuantScheme,
    merge: bool,
    tiny_model: TinyModel,
    quantized_model: QuantizedModel,
    reference_model: Callable[..., Any],
) -> None:
    folder = quantized_model(tiny_model("qwen2"), lambda _: scheme)
    decoder = load(folder, merge=merge)
    ids = torch.randint(3, 512, (30,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        want = reference_model(folder)(ids.unsqueeze(0)).logits[0]
    assert relative_error(logits(decoder), want) <= 1e-5


def test_projections_of_one_scheme_are_joined(
    tiny_model: TinyModel, quantized_model: QuantizedModel
) -> None:
    block = block_at(load(quantized_model(tiny_model(), lambda _: INT4_GROUP)), 1)
    assert block.self_attn.qkv_proj is not None
    assert block.mlp.gate_up_proj is not None
    assert block.self_attn.q_proj is block.self_attn.k_proj is block.self_attn.v_proj is None
    assert block.mlp.gate_proj is block.mlp.up_proj is None


def test_projections_of_different_schemes_stay_apart(
    tiny_model: TinyModel, quantized_model: QuantizedModel
) -> None:
    def mixed(layer: str) -> QuantScheme | None:
        if layer.endswith("q_proj"):
            return INT8_CHANNEL
        return None if layer.endswith("gate_proj") else INT4_GROUP

    folder = quantized_model(tiny_model(), mixed)
    decoder = load(folder)
    block = block_at(decoder, 0)
    assert block.self_attn.qkv_proj is None
    assert block.mlp.gate_up_proj is None
    assert torch.equal(logits(decoder), logits(load(folder, merge=False)))


def test_a_tied_head_is_the_embedding_itself(tiny_model: TinyModel) -> None:
    decoder = load(tiny_model(tie_word_embeddings=True))
    assert decoder.lm_head.weight.data_ptr() == decoder.embed_tokens.data_ptr()


def test_dense_tensors_take_the_asked_dtype(tiny_model: TinyModel) -> None:
    decoder = load(tiny_model("qwen3"), dtype=torch.bfloat16)
    kinds = {parameter.dtype for parameter in decoder.parameters()}
    assert kinds == {torch.bfloat16}
    assert block_at(decoder, 0).self_attn.o_proj.weight.dtype == torch.bfloat16
    assert decoder.lm_head.weight.dtype == torch.bfloat16


def test_sharded_files_give_the_same_model(tiny_model: TinyModel) -> None:
    whole, sharded = tiny_model(), tiny_model(max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert torch.equal(logits(load(whole)), logits(load(sharded)))


def test_progress_counts_every_block(tiny_model: TinyModel) -> None:
    seen: list[tuple[str, int, int]] = []
    load(tiny_model(), progress=lambda *step: seen.append(step))
    assert seen == [("load", i, 3) for i in (1, 2, 3)]


def test_a_block_for_the_quantizer_is_apart_and_equal_to_the_files(tiny_model: TinyModel) -> None:
    folder = tiny_model("qwen2")
    reader = CheckpointReader(folder)
    config, arch = load_config(reader.config), architecture_of(reader.config)
    settings: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    block = load_block(reader, config, arch, 1, **settings)
    stored = load_file(folder / "model.safetensors")
    assert block.self_attn.layer == 1
    assert block.self_attn.q_proj is not None
    assert torch.equal(
        block.self_attn.q_proj.weight, stored["model.layers.1.self_attn.q_proj.weight"]
    )
    assert block.self_attn.q_proj.bias is not None
    assert torch.equal(block.self_attn.q_proj.bias, stored["model.layers.1.self_attn.q_proj.bias"])
    assert torch.equal(
        load_embedding(reader, arch, **settings), stored["model.embed_tokens.weight"]
    )
    assert torch.equal(load_head(reader, config, arch, **settings).weight, stored["lm_head.weight"])


def test_a_quantized_block_is_not_quantized_again(
    tiny_model: TinyModel, quantized_model: QuantizedModel
) -> None:
    reader = CheckpointReader(quantized_model(tiny_model(), lambda _: INT4_GROUP))
    config, arch = load_config(reader.config), architecture_of(reader.config)
    with pytest.raises(UsageError, match=r"layers.0.self_attn.q_proj is quantized already \(int4"):
        load_block(reader, config, arch, 0, device="cpu", dtype=torch.float32)


BIASED = {"attention_bias": True, "mlp_bias": True}


@pytest.mark.parametrize("scheme", [None, INT4_GROUP, INT8_CHANNEL], ids=str)
@pytest.mark.parametrize("merge", [True, False], ids=["merged", "apart"])
def test_the_outputs_of_two_ranks_sum_to_the_whole(
    scheme: QuantScheme | None,
    merge: bool,
    tiny_model: TinyModel,
    quantized_model: QuantizedModel,
) -> None:
    folder = tiny_model(**BIASED)
    if scheme is not None:
        folder = quantized_model(folder, lambda _: scheme)
    whole = load(folder, merge=merge)
    ranks = [load(folder, merge=merge, rank=rank, world=2) for rank in range(2)]
    assert [(r.config.num_heads, r.config.num_kv_heads) for r in ranks] == [(2, 1)] * 2
    x = torch.randn(9, whole.config.hidden_size, generator=torch.Generator().manual_seed(0))
    rope = whole.rotary(torch.arange(9), torch.float32)

    def attend(part: Attention, decoder: Decoder) -> Tensor:
        out: Tensor = part(x, rope, CausalAttention(decoder.config, 1))
        return out

    for layer in range(2):
        parts = [attend(block_at(rank, layer).self_attn, rank) for rank in ranks]
        want = attend(block_at(whole, layer).self_attn, whole)
        assert relative_error(parts[0] + parts[1], want) <= 1e-6
        mlps: list[MLP] = [block_at(rank, layer).mlp for rank in ranks]
        want = block_at(whole, layer).mlp(x)
        assert relative_error(mlps[0](x) + mlps[1](x), want) <= 1e-6
    assert torch.equal(ranks[1].lm_head.weight, whole.lm_head.weight)
    assert torch.equal(ranks[1].embed_tokens, whole.embed_tokens)
