"""The quantized KV cache of an engine: its size, its logits against a decoder whose keys and values
are rounded explicitly, and requests that do not touch each other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quantforge.checkpoint.reader import CheckpointReader
from quantforge.errors import UsageError
from quantforge.models.decoder import Decoder
from quantforge.models.kv_scales import KVScales
from quantforge.models.loader import load_config, load_decoder
from quantforge.models.rope import Rope
from quantforge.runtime import limits
from quantforge.runtime.config import EngineConfig
from quantforge.runtime.engine import Engine
from quantforge.runtime.kv.storage import kv_storage
from quantforge.runtime.request import SamplingParams
from quantforge.schemes import TensorQuant

TinyModel = Callable[..., Path]

FP8 = TensorQuant(num_bits=8, dtype="float", granularity="tensor")
INT8 = TensorQuant(num_bits=8, granularity="tensor")
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
WINDOW = [5, 9, 200, 77, 3, 150, 42, 311, 8, 19, 64, 12, 13, 14, 400, 8, 77, 3, 1, 99, 250]


def scales(quant: TensorQuant, *, layers: int = 2) -> KVScales:
    """Such that a few of the tiny models' keys and values are cut off."""
    largest = 448.0 if quant.dtype == "float" else 127.0
    keys = torch.tensor([4.0 + layer for layer in range(layers)]) / largest
    return KVScales(quant=quant, keys=keys, values=keys / 2)


def load(folder: Path, kv_scales: KVScales | None = None) -> Decoder:
    decoder = load_decoder(CheckpointReader(folder), device="cpu", dtype=torch.float32)
    decoder.kv_scales = kv_scales
    return decoder


def engine_of(folder: Path, choice: str, kv_scales: KVScales | None = None, **more: Any) -> Engine:
    settings = {"page_size": 4, "kv_cache_tokens": 64, "kv_cache_dtype": choice, **more}
    return Engine(load(folder, kv_scales), None, EngineConfig(device="cpu", **settings))


def engine_logits(engine: Engine, window: list[int] = WINDOW) -> Tensor:
    parts: list[Tensor] = []
    engine.score([window], lambda _window, _start, found: parts.append(found.clone()))
    return torch.cat(parts)


class RoundedAttention:
    """The oracle: one whole sequence, its rotated keys and its values rounded by torch's casts."""

    def __init__(self, dtype: torch.dtype, kv_scales: KVScales | None, *, per_token: bool) -> None:
        self.dtype, self.scales, self.per_token = dtype, kv_scales, per_token

    def rounded(self, x_TJA: Tensor, scale: Tensor | None) -> Tensor:
        largest = LARGEST[self.dtype]
        if self.per_token:
            scale = x_TJA.abs().amax(-1, keepdim=True) / largest
        elif scale is None:
            scale = torch.ones(())
        codes = (x_TJA / scale).clamp(-largest, largest)
        if self.dtype == torch.int8:
            codes = codes.round()
        return codes.to(self.dtype).float() * scale

    def attend(self, layer: int, q_THA: Tensor, k_TJA: Tensor, v_TJA: Tensor, rope: Rope) -> Tensor:
        def rotated(x: Tensor) -> Tensor:
            half = x.shape[-1] // 2
            turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
            return x * rope.cos[:, None] + turned * rope.sin[:, None]

        k_scale = None if self.scales is None else self.scales.keys[layer]
        v_scale = None if self.scales is None else self.scales.values[layer]
        k, v = self.rounded(rotated(k_TJA), k_scale), self.rounded(v_TJA, v_scale)
        group = q_THA.shape[1] // k.shape[1]
        out = F.scaled_dot_product_attention(
            rotated(q_THA).transpose(0, 1),
            k.transpose(0, 1).repeat_interleave(group, dim=0),
            v.transpose(0, 1).repeat_interleave(group, dim=0),
            is_causal=True,
        )
        return out.transpose(0, 1)


CASES = [
    ("fp8_e4m3", FP8, torch.float8_e4m3fn, False),
    ("auto", FP8, torch.float8_e4m3fn, False),
    ("fp8_e4m3", None, torch.float8_e4m3fn, True),
    ("fp8_e4m3", INT8, torch.float8_e4m3fn, True),
    ("int8", INT8, torch.int8, False),
    ("auto", INT8, torch.int8, False),
    ("int8", None, torch.int8, True),
    ("fp8_e5m2", None, torch.float8_e5m2, False),
    ("fp8_e5m2", FP8, torch.float8_e5m2, False),
]


@pytest.mark.parametrize(("choice", "quant", "dtype", "per_token"), CASES)
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_logits_are_those_of_a_decoder_whose_keys_and_values_are_rounded(
    arch: str,
    choice: str,
    quant: TensorQuant | None,
    dtype: torch.dtype,
    per_token: bool,
    tiny_model: TinyModel,
) -> None:
    folder = tiny_model(arch)
    given = None if quant is None else scales(quant)
    engine = engine_of(folder, choice, given, max_num_batched_tokens=5)
    decoder = load(folder)
    used = None if per_token or dtype == torch.float8_e5m2 else given
    backend = RoundedAttention(dtype, used, per_token=per_token)
    with torch.inference_mode():
        positions = torch.arange(len(WINDOW))
        expected = decoder.logits(decoder(torch.tensor(WINDOW), positions, backend))
    found = engine_logits(engine)
    exact = engine_logits(engine_of(folder, "model"))
    effect = (found - exact).norm()
    assert effect > 1e-3 * exact.norm(), "the cache is quantized"
    # chunks of another size change a key's last bit, and with it, rarely, its code
    assert (found - expected).norm() < 0.1 * effect


def test_auto_without_scales_and_model_keep_the_dtype_of_the_model(tiny_model: TinyModel) -> None:
    folder = tiny_model()
    plain, model = engine_of(folder, "auto"), engine_of(folder, "model", scales(FP8))
    assert plain.kv_cache == model.kv_cache == "float32"
    assert torch.equal(engine_logits(plain), engine_logits(model))


@pytest.mark.parametrize(
    ("choice", "quant", "head_bytes"),
    [
        ("model", FP8, 2 * 16),
        ("auto", FP8, 16),
        ("auto", None, 2 * 16),
        ("fp8_e4m3", None, 16 + 4),
        ("fp8_e5m2", None, 16),
        ("int8", INT8, 16),
        ("int8", FP8, 16 + 4),
    ],
)
def test_bytes_of_a_token_are_those_of_the_tensors(
    choice: str, quant: TensorQuant | None, head_bytes: int, tiny_model: TinyModel
) -> None:
    """The tiny models have two layers of two key/value heads of 16 values."""
    config = load_config(CheckpointReader(tiny_model()).config)
    storage = kv_storage(choice, torch.bfloat16, None if quant is None else scales(quant))
    assert storage.bytes_per_token(config) == 2 * 2 * 2 * head_bytes
    cache = limits.kv_cache.KVCache(config, 3, 4, storage, torch.device("cpu"))
    tensors = cache.pages.nbytes
    if storage.scale_kind == "token":
        both = (*cache.key_scales, *cache.value_scales)
        tensors += sum(scale.nbytes for scale in both)
    assert tensors == 3 * 4 * storage.bytes_per_token(config)


def test_memory_holds_as_many_more_pages_as_a_token_takes_fewer_bytes(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model()
    monkeypatch.setattr(limits.kv_cache, "free_bytes", lambda *_: 4 * 512 * 40)
    pages = {
        choice: engine_of(folder, choice, kv_cache_tokens=None).pool.num_pages
        for choice in ("model", "fp8_e5m2", "int8")
    }
    assert pages == {"model": 40, "fp8_e5m2": 160, "int8": 128}  # 512, 128 and 160 bytes a token


@pytest.mark.parametrize("choice", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_requests_of_a_batch_get_the_tokens_that_they_get_alone(
    choice: str, tiny_model: TinyModel, prompts: list[list[int]], greedy: SamplingParams
) -> None:
    folder = tiny_model()
    settings = {"kv_cache_tokens": 512}
    alone = [
        engine_of(folder, choice, **settings).generate([p], greedy)[0].token_ids for p in prompts
    ]
    crowded = engine_of(folder, choice, max_num_batched_tokens=16, max_num_seqs=4, **settings)
    assert [c.token_ids for c in crowded.generate(prompts, greedy)] == alone


@pytest.mark.parametrize("choice", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_what_lay_in_a_page_before_reaches_no_request(choice: str, tiny_model: TinyModel) -> None:
    """A kernel may read behind a context's end: NaN codes and NaN scales there are cleared."""
    folder = tiny_model()
    clean, dirty = engine_of(folder, choice), engine_of(folder, choice)
    cache = dirty._runner.cache
    cache.pages.view(torch.uint8).fill_(0x7F)
    if cache.storage.scale_kind == "token":
        for scale in (*cache.key_scales, *cache.value_scales):
            scale.fill_(float("nan"))
    assert torch.equal(engine_logits(dirty, WINDOW[:5]), engine_logits(clean, WINDOW[:5]))


def test_an_unknown_choice_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        UsageError, match="kv_cache_dtype 'fp8' is not one of auto, model, fp8_e4m3"
    ):
        EngineConfig(kv_cache_dtype="fp8")
