"""AutoAWQ's and GPTQ's layouts against golden words and an unpacker written from the description.

Neither AutoAWQ nor GPTQModel is needed; transformers cannot open their files without GPTQModel.
"""

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantforge.checkpoint._words import add_to_words, pack_words, unpack_words
from quantforge.checkpoint.autoawq import FORMAT as AWQ
from quantforge.checkpoint.autoawq import ORDER
from quantforge.checkpoint.base import (
    Format,
    SchemeGroup,
    format_for,
    format_named,
    format_of_config,
)
from quantforge.checkpoint.gptq import FORMAT as GPTQ
from quantforge.checkpoint.gptq_v2 import FORMAT as GPTQ_V2
from quantforge.errors import CheckpointError, UnsupportedError
from quantforge.qtensor import QuantizedTensor
from quantforge.schemes import PRESETS, QuantScheme, TensorQuant

FORMATS = (AWQ, GPTQ, GPTQ_V2)


def scheme_of(num_bits: int, symmetric: bool, group_size: int | None) -> QuantScheme:
    return QuantScheme(
        weight=TensorQuant(
            num_bits=num_bits,
            symmetric=symmetric,
            granularity="group" if group_size else "channel",
            group_size=group_size,
        )
    )


def random_weight(
    scheme: QuantScheme, shape: tuple[int, int], seed: int = 0, lowest_zero: int = 0
) -> QuantizedTensor:
    """Any codes and zero points (not below `lowest_zero`, unsigned), scales of float16."""
    generator = torch.Generator().manual_seed(seed)
    low, high = scheme.weight.code_range
    groups = (shape[0], scheme.weight.num_groups(shape[1]))
    zeros = torch.randint(low + lowest_zero, high + 1, groups, generator=generator).to(torch.int8)
    return QuantizedTensor(
        codes=torch.randint(low, high + 1, shape, generator=generator).to(torch.int8),
        scale=(torch.rand(groups, generator=generator) + 0.01).half(),
        zero_point=None if scheme.weight.symmetric else zeros,
        quant=scheme.weight,
    )


def hexadecimal(words: torch.Tensor) -> list[str]:
    return [f"{word & 0xFFFFFFFF:08x}" for word in words.flatten().tolist()]


COUNTING = torch.arange(-8, 0, dtype=torch.int8).reshape(1, 8)
"""0 .. 7 as signed 4-bit codes."""


def test_golden_words() -> None:
    assert hexadecimal(pack_words(COUNTING, 4)) == ["76543210"]
    assert hexadecimal(pack_words(COUNTING, 4, ORDER)) == ["75316420"]
    middle = pack_words(torch.zeros(1, 8, dtype=torch.int8), 4)
    assert hexadecimal(middle) == ["88888888"]
    assert hexadecimal(add_to_words(middle, -0x11111111)) == ["77777777"]
    zeros = pack_words(COUNTING, 4)
    assert hexadecimal(add_to_words(zeros, -0x11111111)) == ["654320ff"]


def test_a_borrow_of_version_1_is_read_back() -> None:
    scheme = scheme_of(4, symmetric=False, group_size=None)
    tensors = GPTQ.encode(random_weight(scheme, (8, 8), lowest_zero=1))
    tensors["qzeros"] = torch.tensor([[0x654320FF]], dtype=torch.int32)
    zero_point = GPTQ.decode(tensors, scheme).zero_point
    assert zero_point is not None
    assert torch.equal(zero_point.T, COUNTING)


@given(
    num_bits=st.sampled_from([2, 4, 8]),
    rows=st.integers(1, 5),
    words=st.integers(1, 4),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_words_round_trip(num_bits: int, rows: int, words: int, seed: int) -> None:
    half = 1 << (num_bits - 1)
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, words * 32 // num_bits)
    codes = torch.randint(-half, half, shape, generator=generator).to(torch.int8)
    assert torch.equal(unpack_words(pack_words(codes, num_bits), num_bits), codes)
    if num_bits == 4:
        assert torch.equal(unpack_words(pack_words(codes, 4, ORDER), 4, ORDER), codes)


def weight_by_description(
    layouts: Any, layout: Format, tensors: dict[str, torch.Tensor], num_bits: int
) -> torch.Tensor:
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    if layout is AWQ:
        return torch.from_numpy(layouts.awq_weight(arrays))
    return torch.from_numpy(layouts.gptq_weight(arrays, num_bits, 1 if layout is GPTQ else 2))


@given(
    layout=st.sampled_from(FORMATS),
    num_bits=st.sampled_from([2, 4, 8]),
    symmetric=st.booleans(),
    group_size=st.sampled_from([None, 16, 32]),
    units=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    seed=st.integers(0, 999),
)
@settings(max_examples=80, deadline=None)
def test_encoded_layers_are_what_the_description_says_and_decode_again(
    layouts: Any,
    layout: Format,
    num_bits: int,
    symmetric: bool,
    group_size: int | None,
    units: tuple[int, int],
    seed: int,
) -> None:
    scheme = scheme_of(num_bits, symmetric, group_size)
    if not layout.matches(scheme):
        return
    weight = random_weight(scheme, (16 * units[0], 32 * units[1]), seed, int(layout is GPTQ))
    tensors = layout.encode(weight)
    announced = layout.tensors(weight.shape, scheme, torch.float16)
    assert {n: (tuple(t.shape), t.dtype) for n, t in tensors.items()} == {
        n: (spec.shape, spec.dtype) for n, spec in announced.items()
    }
    described = weight_by_description(layouts, layout, tensors, num_bits)
    assert torch.equal(described, weight.dequantize(torch.float32))
    decoded = layout.decode(tensors, scheme)
    assert layout.layer_shape(tensors) == weight.shape
    assert torch.equal(decoded.codes, weight.codes)
    assert torch.equal(decoded.scale, weight.scale)
    assert decoded.permutation is None
    if weight.zero_point is None:
        assert decoded.zero_point is None
    else:
        assert decoded.zero_point is not None
        assert torch.equal(decoded.zero_point, weight.zero_point)


def test_version_1_never_stores_a_zero_of_0() -> None:
    scheme = scheme_of(4, symmetric=False, group_size=8)
    weight = random_weight(scheme, (8, 32))
    assert weight.zero_point is not None
    weight.zero_point[:, 0] = -8
    weight.codes[:, :8].clamp_(max=6)
    weight.zero_point[:, 1:].clamp_(min=-7)
    tensors = GPTQ.encode(weight)
    decoded = GPTQ.decode(tensors, scheme)
    assert decoded.zero_point is not None
    assert int(decoded.zero_point.min()) >= -7
    assert torch.equal(decoded.dequantize(), weight.dequantize())


def test_activation_order_becomes_a_permutation(layouts: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    scheme = scheme_of(4, symmetric=False, group_size=16)
    g_idx = (torch.arange(64) // 16)[torch.randperm(64, generator=generator)]
    arrays = layouts.gptq_tensors(
        torch.randint(0, 16, (24, 64), generator=generator).numpy(),
        torch.randint(1, 16, (4, 24), generator=generator).numpy(),
        (torch.rand(4, 24, generator=generator) + 0.1).numpy(),
        g_idx.numpy(),
        version=1,
    )
    decoded = GPTQ.decode({n: torch.from_numpy(a) for n, a in arrays.items()}, scheme)
    assert decoded.permutation is not None
    expected = torch.from_numpy(layouts.gptq_weight(arrays, 4, 1))
    assert torch.equal(decoded.dequantize(torch.float32), expected)
    for layout in (*FORMATS, format_named("pack-quantized")):
        with pytest.raises(UnsupportedError, match="activation order"):
            layout.encode(decoded)


G = torch.arange(64, dtype=torch.int32) // 32
BAD_LAYERS: list[tuple[str, torch.Tensor | None, str]] = [
    ("qweight", None, "qweight is missing"),
    ("qzeros", None, "qzeros is missing"),
    ("scales", None, "scales is missing"),
    ("qweight", torch.zeros(0, 16, dtype=torch.int32), "qweight .*sizes above 0"),
    ("qweight", torch.zeros(64, 0, dtype=torch.int32), "qweight .*sizes above 0"),
    ("qweight", torch.zeros(8, dtype=torch.int32), "qweight .*sizes above 0"),
    ("qweight", torch.zeros(8, 16), "qweight is torch.float32"),
    ("qweight", torch.zeros(8, 5, dtype=torch.int32), "qweight|qzeros"),
    ("qzeros", torch.zeros(2, 3, dtype=torch.int32), r"qzeros .*\[2, 3\]"),
    ("scales", torch.ones(3, 16).half(), r"scales .*\[3, 16\]"),
    ("scales", torch.ones(2, 16, dtype=torch.int8), "scales is torch.int8"),
]
BAD_ORDERS: list[tuple[str, torch.Tensor | None, str]] = [
    ("g_idx", None, "g_idx is missing"),
    ("g_idx", G - 1, r"g_idx spans -1 \.\. 0; allowed are 0 \.\. 1"),
    ("g_idx", G + 1, r"g_idx spans 1 \.\. 2"),
    ("g_idx", G * 0, "g_idx gives 64 inputs to group 0; each has 32"),
    ("g_idx", G.float(), "g_idx is torch.float32"),
    ("g_idx", G[:0], r"g_idx is torch.int32 \[0\]"),
    ("g_idx", G[:32], "qweight"),
]


@pytest.mark.parametrize(
    ("layout", "suffix", "tensor", "says"),
    [
        pytest.param(layout, *case, id=f"{layout.name}-{case[2]}")
        for layout in FORMATS
        for case in (BAD_LAYERS if layout is AWQ else BAD_LAYERS + BAD_ORDERS)
    ],
)
def test_a_malformed_layer_says_what_is_wrong(
    layout: Format, suffix: str, tensor: torch.Tensor | None, says: str
) -> None:
    scheme = scheme_of(4, symmetric=False, group_size=32)
    tensors = layout.encode(random_weight(scheme, (16, 64), lowest_zero=1))
    if tensor is None:
        del tensors[suffix]
    else:
        tensors[suffix] = tensor
    with pytest.raises(CheckpointError, match=says):
        layout.decode(tensors, scheme)


@pytest.mark.parametrize("layout", FORMATS, ids=lambda f: f.name)
def test_an_absurd_group_size_is_refused_without_allocating(layout: Format) -> None:
    tensors = layout.encode(random_weight(scheme_of(4, False, 32), (16, 64), lowest_zero=1))
    with pytest.raises(CheckpointError, match="group_size 1000000000000 does not divide"):
        layout.decode(tensors, scheme_of(4, symmetric=False, group_size=10**12))


def test_symmetric_with_other_zeros_is_refused_and_hints_at_the_version() -> None:
    scheme = scheme_of(4, symmetric=True, group_size=32)
    tensors = GPTQ.encode(random_weight(scheme, (16, 64)))
    with pytest.raises(
        CheckpointError, match=r"qzeros hold 7 \.\. 7 as gptq_v2.*checkpoint_format"
    ):
        GPTQ_V2.decode(tensors, scheme)


@pytest.mark.parametrize("layout", FORMATS, ids=lambda f: f.name)
def test_what_does_not_fit_is_refused_when_written(layout: Format) -> None:
    scheme = scheme_of(4, symmetric=False, group_size=32)
    with pytest.raises(UnsupportedError, match=r"12 .*not a multiple of 8"):
        layout.encode(random_weight(scheme, (12, 64)))
    huge = random_weight(scheme, (16, 64), lowest_zero=1)
    object.__setattr__(huge, "scale", huge.scale.float() * 1e6)
    with pytest.raises(UnsupportedError, match="zero or infinite in float16"):
        layout.encode(huge)
    with pytest.raises(UnsupportedError, match="cannot hold"):
        layout.encode(random_weight(scheme_of(3, symmetric=False, group_size=32), (16, 64)))


@pytest.mark.parametrize("layout", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("group_size", [None, 64])
def test_our_config_reads_back(layout: Format, group_size: int | None) -> None:
    scheme = scheme_of(4, symmetric=False, group_size=group_size)
    group = SchemeGroup(targets=("Linear",), scheme=scheme)
    config = layout.quantization_config([group], ["lm_head", "model.layers.1.mlp.up_proj"])
    assert format_of_config(config) is layout
    read = layout.parse_config(config)
    assert read.scheme("model.layers.11.mlp.up_proj") == scheme
    assert read.scheme("model.layers.1.mlp.up_proj") is None
    assert read.scheme("lm_head") is None


@pytest.mark.parametrize("layout", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("group_size", [None, 64])
def test_transformers_reads_our_config_and_we_read_its(
    layout: Format, group_size: int | None
) -> None:
    from transformers import AwqConfig, GPTQConfig

    scheme = scheme_of(4, symmetric=False, group_size=group_size)
    ours = layout.quantization_config([SchemeGroup(targets=("Linear",), scheme=scheme)], [])
    parsed = (AwqConfig if layout is AWQ else GPTQConfig).from_dict(dict(ours))
    assert (parsed.bits, parsed.group_size) == (4, group_size or -1)
    if layout is not AWQ:
        assert (parsed.sym, parsed.desc_act) == (False, False)
    theirs = json.loads(json.dumps(parsed.to_dict()))
    assert format_of_config(theirs) is layout
    assert layout.parse_config(theirs).scheme("model.layers.0.mlp.up_proj") == scheme


def test_a_quantized_lm_head_is_for_gptq_only() -> None:
    group = SchemeGroup(targets=("Linear",), scheme=PRESETS["w4a16"])
    read = GPTQ.parse_config(GPTQ.quantization_config([group], []))
    assert read.scheme("lm_head") == PRESETS["w4a16"]
    assert AWQ.refuse("lm_head", (512, 128), PRESETS["w4a16"]) == "format awq keeps lm_head dense"


def test_gptq_keeps_several_schemes_in_dynamic() -> None:
    groups = [
        SchemeGroup(targets=("Linear",), scheme=PRESETS["w4a16"]),
        SchemeGroup(targets=("model.layers.0.mlp.down_proj",), scheme=PRESETS["w8a16"]),
    ]
    read = GPTQ.parse_config(GPTQ.quantization_config(groups, ["lm_head"]))
    assert read.scheme("model.layers.0.mlp.down_proj") == PRESETS["w8a16"]
    assert read.scheme("model.layers.1.mlp.down_proj") == PRESETS["w4a16"]
    with pytest.raises(UnsupportedError, match="one int4 scheme"):
        AWQ.quantization_config(groups, ["lm_head"])


def test_modules_in_block_to_quantize_limits_the_targets() -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    config["modules_in_block_to_quantize"] = [["self_attn.q_proj"], ["mlp.up_proj"]]
    read = GPTQ.parse_config(config)
    assert read.scheme("model.layers.0.self_attn.q_proj") == PRESETS["w4a16_sym"]
    assert read.scheme("model.layers.0.self_attn.k_proj") is None


AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
GPTQ_CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}


@pytest.mark.parametrize("base", [AWQ_CONFIG, GPTQ_CONFIG], ids=["awq", "gptq"])
@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"bits": 3}, UnsupportedError, "bits 3"),
        ({"bits": True}, CheckpointError, "bits is True"),
        ({"bits": "4"}, CheckpointError, "bits is '4'"),
        ({"group_size": 0}, CheckpointError, "group_size 0"),
        ({"group_size": -5}, CheckpointError, "group_size -5"),
        ({"group_size": None}, CheckpointError, "group_size is None"),
        ({"group_size": 1.5}, CheckpointError, "group_size is 1.5"),
        ({"zero_point": False, "sym": 1}, (UnsupportedError, CheckpointError), "zero_point|sym"),
        (
            {"modules_to_not_convert": [""], "dynamic": {"-:(": {}}},
            CheckpointError,
            "modules_to_not_convert|no pattern",
        ),
        (
            {"modules_to_not_convert": "all", "dynamic": ["a"]},
            CheckpointError,
            "list of names|dynamic is",
        ),
        (
            {"modules_to_not_convert": [3], "dynamic": {"a": 3}},
            CheckpointError,
            "modules_to_not_convert|expected a mapping",
        ),
    ],
)
def test_a_broken_config_says_what_is_wrong(
    base: dict[str, Any], change: dict[str, Any], error: Any, says: str
) -> None:
    config = base | change
    with pytest.raises(error, match=says):
        format_of_config(config).parse_config(config)


def test_the_native_format_is_preferred_and_names_are_known() -> None:
    assert format_for(PRESETS["w4a16"]).name == "pack-quantized"
    for layout in FORMATS:
        assert format_named(layout.name) is layout
    with pytest.raises(UnsupportedError, match=r"'gptq_v3'.*did you mean 'gptq_v2'.*known: pack-q"):
        format_named("gptq_v3")
