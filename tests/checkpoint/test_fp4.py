"""The formats of E2M1 weights against the compressed-tensors package, both ways and bit for bit."""

from typing import Any

import pytest
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from hypothesis import given, settings
from hypothesis import strategies as st
from quantforge_kernels.rounding import round_from_fp4

from quantforge.checkpoint._fp4 import pack_fp4, unpack_fp4
from quantforge.checkpoint.base import Format, SchemeGroup, format_for, format_of_config
from quantforge.errors import CheckpointError, RecipeError, UnsupportedError
from quantforge.qtensor import QuantizedTensor, quantize
from quantforge.schemes import PRESETS, QuantScheme, TensorQuant

NAMES = ["nvfp4a16", "mxfp4a16"]
SHAPES = ((48, 64), (33, 96), (1, 32), (10, 160))
COMPRESSORS = {"nvfp4a16": NVFP4PackedCompressor, "mxfp4a16": MXFP4PackedCompressor}


def oracle(name: str) -> QuantizationScheme:
    scheme = preset_name_to_scheme(name.upper(), ["Linear"])
    scheme.format = format_for(PRESETS[name]).name
    return scheme


def layout(name: str) -> Format:
    return format_for(PRESETS[name])


def make(name: str, shape: tuple[int, int]) -> tuple[torch.Tensor, QuantizedTensor]:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(7)) / 7
    return weight, quantize(weight, PRESETS[name].weight)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit: -0 is not 0."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def oracle_state(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """What compressed-tensors makes of a weight, up to packing: its own scales."""
    arguments = oracle(name).weights
    groups = weight.unflatten(1, (-1, arguments.group_size))
    shared = generate_gparam(weight.min(), weight.max()) if name == "nvfp4a16" else None
    low, high = groups.amin(-1), groups.amax(-1)
    scale, _ = calculate_qparams(low, high, arguments, global_scale=shared)
    state = {"weight": weight, "weight_scale": scale}
    return state if shared is None else state | {"weight_global_scale": shared}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantized_and_encoded_weights_are_the_packages_own(
    name: str, shape: tuple[int, int]
) -> None:
    weight, qtensor = make(name, shape)
    expected = COMPRESSORS[name].compress(oracle_state(name, weight), oracle(name))
    encoded = layout(name).encode(qtensor)
    assert encoded.keys() == expected.keys()
    for suffix, tensor in expected.items():
        assert same(encoded[suffix], tensor), suffix


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_packages_decompress_gives_our_weight(name: str, shape: tuple[int, int]) -> None:
    _, qtensor = make(name, shape)
    tensors = layout(name).encode(qtensor)
    expected = COMPRESSORS[name].decompress(tensors, oracle(name))["weight"]
    decoded = layout(name).decode(tensors, PRESETS[name])
    assert same(decoded.dequantize(torch.bfloat16), expected)


@pytest.mark.parametrize("name", NAMES)
def test_we_decode_what_the_package_compressed(name: str) -> None:
    weight, _ = make(name, (33, 96))
    weight[3, 32:64] = 0  # a group of zeros, which the package scales otherwise
    tensors = COMPRESSORS[name].compress(oracle_state(name, weight), oracle(name))
    ours = layout(name).decode(tensors, PRESETS[name]).dequantize(torch.bfloat16)
    assert same(ours, COMPRESSORS[name].decompress(tensors, oracle(name))["weight"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_undoes_encode(name: str, shape: tuple[int, int]) -> None:
    _, qtensor = make(name, shape)
    decoded = layout(name).decode(layout(name).encode(qtensor), PRESETS[name])
    assert same(decoded.codes, qtensor.codes)
    assert same(decoded.scale, qtensor.scale)
    assert decoded.quant == qtensor.quant
    assert decoded.zero_point is None
    if name == "nvfp4a16":
        assert decoded.global_scale is not None
        assert qtensor.global_scale is not None
        assert same(decoded.global_scale, qtensor.global_scale)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tensors_are_as_announced(name: str, shape: tuple[int, int]) -> None:
    encoded = layout(name).encode(make(name, shape)[1])
    announced = layout(name).tensors(shape, PRESETS[name], torch.bfloat16)
    assert encoded.keys() == announced.keys()
    for suffix, spec in announced.items():
        assert tuple(encoded[suffix].shape) == spec.shape
        assert encoded[suffix].dtype == spec.dtype
        assert encoded[suffix].nbytes == spec.num_bytes
        assert encoded[suffix].is_contiguous()
    assert layout(name).layer_shape(encoded) == shape


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 2**31))
def test_packing_is_the_packages_and_unpacking_undoes_it(rows: int, pairs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, 2 * pairs), generator=generator, dtype=torch.uint8)
    packed = pack_fp4(codes)
    values = round_from_fp4(codes, torch.ones(1))
    assert torch.equal(packed, pack_fp4_to_uint8(values))
    assert torch.equal(unpack_fp4(packed), codes)
    unpacked = unpack_fp4_from_uint8(packed, rows, 2 * pairs, torch.float32)
    assert same(round_from_fp4(unpack_fp4(packed), torch.ones(1)), unpacked)


def test_even_columns_lie_in_the_low_half() -> None:
    packed = pack_fp4(torch.arange(8, dtype=torch.uint8).reshape(1, 8))
    assert packed.tolist() == [[0x10, 0x32, 0x54, 0x76]]


@pytest.mark.parametrize("name", NAMES)
def test_our_presets_are_written_as_the_packages_own(name: str) -> None:
    group = SchemeGroup(targets=("Linear",), scheme=PRESETS[name])
    section = layout(name).quantization_config([group], [])["config_groups"]["group_0"]
    assert section["weights"] == oracle(name).model_dump()["weights"]
    read = QuantizationScheme.model_validate(section)
    assert read.format == layout(name).name


@pytest.mark.parametrize("name", NAMES)
def test_we_read_the_packages_config(name: str) -> None:
    written = QuantizationConfig(
        config_groups={"group_0": oracle(name)},
        ignore=["lm_head"],
        format=layout(name).name,
        quantization_status="compressed",
    ).model_dump()
    assert format_of_config(written) is layout(name)
    parsed = layout(name).parse_config(written)
    assert [group.scheme for group in parsed.groups] == [PRESETS[name]]
    assert parsed.ignore == ("lm_head",)


@pytest.mark.parametrize("name", ["NVFP4", "MXFP4"])
def test_quantized_activations_are_refused(name: str) -> None:
    target = layout(f"{name.lower()}a16")
    written = QuantizationConfig(
        config_groups={"group_0": preset_name_to_scheme(name, ["Linear"])},
        format=target.name,
        quantization_status="compressed",
    ).model_dump()
    with pytest.raises(UnsupportedError, match=r"cannot hold scheme fp4-.*\+fp4-.*dynamic"):
        target.parse_config(written)


@pytest.mark.parametrize("name", NAMES)
def test_each_format_holds_its_own_scheme_only(name: str) -> None:
    assert [n for n, s in PRESETS.items() if layout(name).matches(s)] == [name]
    other = NAMES[1 - NAMES.index(name)]
    with pytest.raises(UnsupportedError, match=f"{layout(name).name} cannot hold"):
        layout(name).encode(make(other, (33, 96))[1])


@pytest.mark.parametrize(
    ("name", "suffix", "tensor", "says"),
    [
        ("nvfp4a16", "weight_packed", None, "weight_packed is missing"),
        ("nvfp4a16", "weight_packed", torch.zeros(33, 48), "weight_packed is torch.float32"),
        ("nvfp4a16", "weight_scale", torch.ones(33, 6), "weight_scale is torch.float32"),
        ("nvfp4a16", "weight_global_scale", None, "weight_global_scale is missing"),
        ("nvfp4a16", "weight_global_scale", torch.zeros(1), "weight_global_scale is 0.0"),
        ("nvfp4a16", "weight_global_scale", torch.full((1,), torch.inf), "scale is inf"),
        ("nvfp4a16", "weight_global_scale", -torch.ones(1), "scale is -1.0"),
        ("mxfp4a16", "weight_packed", torch.zeros(33, dtype=torch.uint8), "two sizes above 0"),
        ("mxfp4a16", "weight_scale", torch.ones(33, 3), "weight_scale is torch.float32"),
        (
            "mxfp4a16",
            "weight_scale",
            torch.full((33, 3), 255, dtype=torch.uint8),
            "weight_scale holds 99 values that are NaN",
        ),
    ],
)
def test_a_malformed_layer_says_what_is_wrong(
    name: str, suffix: str, tensor: torch.Tensor | None, says: str
) -> None:
    tensors = layout(name).encode(make(name, (33, 96))[1])
    if tensor is None:
        del tensors[suffix]
    else:
        tensors[suffix] = tensor
    with pytest.raises(CheckpointError, match=says):
        layout(name).decode(tensors, PRESETS[name])


def test_static_scales_of_activations_are_refused() -> None:
    tensors = layout("nvfp4a16").encode(make("nvfp4a16", (33, 96))[1])
    tensors["input_global_scale"] = torch.ones(1)
    with pytest.raises(UnsupportedError, match="input_global_scale"):
        layout("nvfp4a16").decode(tensors, PRESETS["nvfp4a16"])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"scale_format": "e5m2"}, "scale_format 'e5m2' is not one of e4m3, e8m0"),
        ({"group_size": 32}, "e4m3 belongs to float codes of 4 bits in groups of 16"),
        ({"num_bits": 8}, "not to float of 8 bits"),
        ({"dtype": "int"}, "not to int of 4 bits"),
        ({"granularity": "channel", "group_size": None}, "group_size None"),
    ],
)
def test_impossible_scale_formats_are_refused(changes: dict[str, Any], says: str) -> None:
    fields: dict[str, Any] = {
        "num_bits": 4,
        "dtype": "float",
        "granularity": "group",
        "group_size": 16,
        "scale_format": "e4m3",
    }
    with pytest.raises(RecipeError, match=says):
        TensorQuant(**(fields | changes))


def test_a_shape_that_groups_do_not_divide_is_refused() -> None:
    scheme: QuantScheme = PRESETS["mxfp4a16"]
    reason = scheme.refuse_shape((8, 48))
    assert reason is not None
    assert "group_size 32 of fp4-g32-e8m0 does not divide in_features 48" in reason
