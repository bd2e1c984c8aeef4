"""The one decoder gives transformers' logits, for every family and in every arrangement.

Legend: S sequences, L tokens of a sequence, T tokens in all, V vocabulary.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from quantforge_kernels import rope as rope_op
from torch import Tensor

from quantforge.checkpoint.reader import CheckpointReader
from quantforge.models.attention import CausalAttention
from quantforge.models.decoder import Decoder
from quantforge.models.loader import load_decoder
from quantforge.models.rope import Rope

LENGTH = 40

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama multi-head": ("llama", {"num_key_value_heads": 4}),
    "llama multi-query": ("llama", {"num_key_value_heads": 1}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama own head dim": ("llama", {"head_dim": 24}),
    "llama eps": ("llama", {"rms_norm_eps": 1e-2}),
    "mistral": ("mistral", {}),
    "mistral window": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3 biases": ("qwen3", {"attention_bias": True}),
    "qwen3 window": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic within": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
}


class PlainCache:
    """An `AttentionBackend` that keeps every key and value in lists and attends by the textbook.

    `slices` are the flattened batch's sequences, whose earlier tokens the cache holds.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.config = decoder.config
        self.slices: Sequence[tuple[int, slice]] = ()
        self.kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q_THA: Tensor, k_TJA: Tensor, v_TJA: Tensor, rope: Rope) -> Tensor:
        q_THA, k_TJA = rope_op.reference(q_THA, k_TJA, rope.cos, rope.sin)
        out = torch.full_like(q_THA, torch.nan)
        for sequence, part in self.slices:
            keys, values = k_TJA[part], v_TJA[part]
            if (sequence, layer) in self.kept:
                old_keys, old_values = self.kept[sequence, layer]
                keys, values = torch.cat((old_keys, keys)), torch.cat((old_values, values))
            self.kept[sequence, layer] = keys, values
            out[part] = self._attend_one(q_THA[part], keys, values, self.config.window(layer))
        return out

    def _attend_one(self, q: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
        share = self.config.num_heads // self.config.num_kv_heads
        keys, values = (x.repeat_interleave(share, dim=1) for x in (keys, values))
        scores = torch.einsum("qha,kha->hqk", q, keys) / self.config.head_dim**0.5
        query_at = torch.arange(keys.shape[0] - q.shape[0], keys.shape[0]).unsqueeze(1)
        distance = query_at - torch.arange(keys.shape[0])
        hidden = distance < 0
        if window is not None:
            hidden |= distance >= window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,kha->qha", weights, values)


@torch.inference_mode()
def feed(decoder: Decoder, cache: PlainCache, chunks: dict[int, tuple[int, Tensor]]) -> Tensor:
    """Logits [T, V] of sequence -> (first position, new tokens), all in one flattened call."""
    slices, positions, start = [], [], 0
    for sequence, (first, tokens) in chunks.items():
        slices.append((sequence, slice(start, start + len(tokens))))
        positions.append(torch.arange(first, first + len(tokens)))
        start += len(tokens)
    cache.slices = slices
    flat = torch.cat([tokens for _, tokens in chunks.values()])
    return decoder.logits(decoder(flat, torch.cat(positions), cache))


@torch.inference_mode()
def causal_logits(decoder: Decoder, ids_SL: Tensor) -> Tensor:
    """Logits [S, L, V] through the calibration's dense attention."""
    sequences, length = ids_SL.shape
    backend = CausalAttention(decoder.config, sequences)
    positions = torch.arange(length, device=ids_SL.device).repeat(sequences)
    return decoder.logits(decoder(ids_SL.reshape(-1), positions, backend)).unflatten(
        0, (sequences, length)
    )


@torch.inference_mode()
def oracle_logits(model: Any, ids_SL: Tensor, **arguments: Any) -> Tensor:
    logits: Tensor = model(ids_SL, **arguments).logits
    return logits


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def token_ids(*shape: int) -> Tensor:
    return torch.randint(3, 512, shape, generator=torch.Generator().manual_seed(1))


def decoder_of(folder: Path, **arguments: Any) -> Decoder:
    settings: dict[str, Any] = {"device": "cpu", "dtype": torch.float32} | arguments
    return load_decoder(CheckpointReader(folder), **settings)


@pytest.mark.parametrize("merge", [True, False], ids=["merged", "apart"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(
    family: str, merge: bool, tiny_model: Callable[..., Path], reference_model: Callable[..., Any]
) -> None:
    arch, overrides = FAMILIES[family]
    folder = tiny_model(arch, **overrides)
    ids = token_ids(3, LENGTH)
    got = causal_logits(decoder_of(folder, merge=merge), ids)
    assert relative_error(got, oracle_logits(reference_model(folder), ids)) <= 1e-5


@pytest.mark.parametrize("rope", ROPES)
def test_logits_equal_transformers_with_scaled_rope(
    rope: str, tiny_model: Callable[..., Path], reference_model: Callable[..., Any]
) -> None:
    folder = tiny_model("llama", rope_parameters=ROPES[rope] | {"rope_theta": 500.0})
    ids = token_ids(2, LENGTH)
    got = causal_logits(decoder_of(folder), ids)
    assert relative_error(got, oracle_logits(reference_model(folder), ids)) <= 1e-5


def test_dynamic_rope_beyond_the_trained_length_equals_transformers(
    tiny_model: Callable[..., Path], reference_model: Callable[..., Any]
) -> None:
    scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 500.0}
    folder = tiny_model("llama", rope_parameters=scaling, max_position_embeddings=16)
    decoder, model = decoder_of(folder), reference_model(folder)
    for length in (LENGTH, 12):  # the short one last: nothing of the long one may stay behind
        ids = token_ids(2, length)
        assert relative_error(causal_logits(decoder, ids), oracle_logits(model, ids)) <= 1e-5


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["llama", "mistral window", "qwen2", "qwen3"])
def test_sequences_laid_end_to_end_equal_the_rows_of_a_padded_batch(
    family: str,
    side: str,
    tiny_model: Callable[..., Path],
    reference_model: Callable[..., Any],
) -> None:
    arch, overrides = FAMILIES[family]
    folder = tiny_model(arch, **overrides)
    lengths = (LENGTH, 7, 1, 23)
    rows = [token_ids(1, n)[0] for n in lengths]
    padded = torch.zeros(len(lengths), LENGTH, dtype=torch.int64)
    mask = torch.zeros_like(padded)
    for row, tokens in enumerate(rows):
        part = slice(LENGTH - len(tokens), None) if side == "left" else slice(len(tokens))
        padded[row, part], mask[row, part] = tokens, 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    want = oracle_logits(
        reference_model(folder), padded, attention_mask=mask, position_ids=positions
    )
    decoder = decoder_of(folder)
    together = feed(decoder, PlainCache(decoder), {i: (0, r) for i, r in enumerate(rows)})
    start = 0
    for row, tokens in enumerate(rows):
        own = want[row][mask[row].bool()]
        assert relative_error(together[start : start + len(tokens)], own) <= 1e-5
        assert relative_error(causal_logits(decoder, tokens.unsqueeze(0))[0], own) <= 1e-5
        start += len(tokens)


@pytest.mark.parametrize("family", ["llama", "mistral window", "qwen2 window", "qwen3"])
def test_prefill_in_chunks_then_decode_equals_the_whole_sequence(
    family: str, tiny_model: Callable[..., Path], reference_model: Callable[..., Any]
) -> None:
    arch, overrides = FAMILIES[family]
    folder = tiny_model(arch, **overrides)
    ids = token_ids(2, LENGTH)
    decoder = decoder_of(folder)
    cache = PlainCache(decoder)
    steps = [feed(decoder, cache, {i: (0, ids[i, :13]) for i in range(2)}).unflatten(0, (2, -1))]
    steps.append(
        feed(decoder, cache, {i: (13, ids[i, 13:20]) for i in range(2)}).unflatten(0, (2, -1))
    )
    for at in range(20, LENGTH):
        step = feed(decoder, cache, {i: (at, ids[i, at : at + 1]) for i in range(2)})
        steps.append(step.unflatten(0, (2, -1)))
    want = oracle_logits(reference_model(folder), ids)
    assert relative_error(torch.cat(steps, dim=1), want) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_strays_from_float32_no_further_than_transformers(
    dtype: torch.dtype, tiny_model: Callable[..., Path], reference_model: Callable[..., Any]
) -> None:
    folder = tiny_model("qwen3")
    ids = token_ids(2, LENGTH)
    want = oracle_logits(reference_model(folder), ids)
    theirs = relative_error(oracle_logits(reference_model(folder, dtype), ids).float(), want)
    ours = relative_error(causal_logits(decoder_of(folder, dtype=dtype), ids), want)
    assert ours <= 1.2 * theirs


@pytest.mark.gpu
@pytest.mark.parametrize("merge", [True, False], ids=["merged", "apart"])
@pytest.mark.parametrize("family", ["llama biases", "llama tied", "mistral window", "qwen3"])
def test_logits_on_a_gpu_equal_transformers_on_the_cpu(
    family: str, merge: bool, tiny_model: Callable[..., Path], reference_model: Callable[..., Any]
) -> None:
    arch, overrides = FAMILIES[family]
    folder = tiny_model(arch, **overrides)
    ids = token_ids(3, LENGTH)
    got = causal_logits(decoder_of(folder, merge=merge, device="cuda"), ids.cuda()).cpu()
    assert relative_error(got, oracle_logits(reference_model(folder), ids)) <= 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
def test_scaled_rope_on_a_gpu_equals_transformers_on_the_cpu(
    kind: str, tiny_model: Callable[..., Path], reference_model: Callable[..., Any]
) -> None:
    scaling = {"rope_type": kind, "factor": 4.0, "rope_theta": 500.0}
    folder = tiny_model("llama", rope_parameters=scaling, max_position_embeddings=16)
    ids = token_ids(2, LENGTH)
    got = causal_logits(decoder_of(folder, device="cuda"), ids.cuda()).cpu()
    assert relative_error(got, oracle_logits(reference_model(folder), ids)) <= 1e-4
