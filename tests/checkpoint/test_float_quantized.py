"""The float-quantized format against the compressed-tensors package, both ways."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import compress_module
from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    initialize_module_for_quantization,
)
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.quantization.utils import calculate_qparams

from quantforge.checkpoint.base import SchemeGroup, format_for, format_of_config
from quantforge.checkpoint.float_quantized import FORMAT
from quantforge.errors import CheckpointError, UnsupportedError
from quantforge.models.linear import Linear
from quantforge.qtensor import QuantizedTensor, quantize
from quantforge.schemes import PRESETS, QuantScheme, TensorQuant

TENSOR = QuantScheme(weight=TensorQuant(num_bits=8, dtype="float", granularity="tensor"))
CHANNEL, BLOCK = PRESETS["fp8_dynamic"], PRESETS["fp8_block"]
SMALL_BLOCK = QuantScheme(
    weight=TensorQuant(num_bits=8, dtype="float", granularity="block", block_shape=(16, 32))
)
STATIC = PRESETS["fp8_static"]
CASES = [pytest.param(s, id=str(s)) for s in (TENSOR, CHANNEL, BLOCK, SMALL_BLOCK, STATIC)]
SHAPES = ((48, 64), (33, 100), (1, 32), (130, 257))


def oracle_arguments(quant: TensorQuant) -> QuantizationArgs:
    return QuantizationArgs(
        num_bits=8,
        type="float",
        symmetric=True,
        strategy=quant.granularity,
        group_size=quant.group_size,
        block_structure=quant.block_shape,
        dynamic=quant.dynamic,
    )


def oracle_scheme(scheme: QuantScheme) -> QuantizationScheme:
    return QuantizationScheme(
        targets=["Linear"],
        weights=oracle_arguments(scheme.weight),
        input_activations=scheme.activation and oracle_arguments(scheme.activation),
        format="float-quantized",
    )


def make(
    scheme: QuantScheme, shape: tuple[int, int], dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, QuantizedTensor]:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(7)) / 3
    weight[0] = 0
    qtensor = quantize(weight, scheme.weight, scale_dtype=dtype)
    if scheme.has_static_inputs:
        qtensor = replace(qtensor, input_scale=torch.tensor([0.0371], dtype=dtype))
    return weight, qtensor


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit: -0 is not 0."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("scheme", CASES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_encoded_tensors_equal_the_packages_compress(
    scheme: QuantScheme, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight, qtensor = make(scheme, shape, dtype)
    encoded = FORMAT.encode(qtensor)
    state = {"weight": weight} | {n: t for n, t in encoded.items() if n.endswith("_scale")}
    expected = FloatQuantizationCompressor.compress(state, oracle_scheme(scheme))
    assert encoded.keys() == expected.keys()
    for suffix, tensor in expected.items():
        assert same(encoded[suffix], tensor), suffix


@pytest.mark.parametrize("scheme", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_packages_decompress_gives_our_weight(scheme: QuantScheme, dtype: torch.dtype) -> None:
    _, qtensor = make(scheme, (130, 257), dtype)
    tensors = FORMAT.encode(qtensor)
    expected = FloatQuantizationCompressor.decompress(tensors, oracle_scheme(scheme))["weight"]
    assert same(FORMAT.decode(tensors, scheme).dequantize(), expected)


@pytest.mark.parametrize("scheme", CASES)
def test_decode_undoes_encode(scheme: QuantScheme) -> None:
    _, qtensor = make(scheme, (130, 257), torch.bfloat16)
    decoded = FORMAT.decode(FORMAT.encode(qtensor), scheme)
    assert same(decoded.codes, qtensor.codes)
    assert same(decoded.scale, qtensor.scale)
    assert decoded.quant == scheme.weight
    assert (decoded.input_scale is None) == (qtensor.input_scale is None)
    if decoded.input_scale is not None and qtensor.input_scale is not None:
        assert same(decoded.input_scale, qtensor.input_scale)
    assert decoded.zero_point is None


def test_scales_of_channels_are_those_of_the_package() -> None:
    weight, qtensor = make(CHANNEL, (33, 100))
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    expected, _ = calculate_qparams(low, high, oracle_arguments(CHANNEL.weight))
    assert torch.equal(qtensor.scale[1:], expected[1:])
    assert qtensor.scale[0].item() == 1.0  # a row of zeros, where the package has an epsilon


def test_scales_of_blocks_are_the_largest_magnitude_over_448() -> None:
    weight, qtensor = make(BLOCK, (130, 257))
    assert qtensor.scale.shape == (2, 3)
    for row in range(2):
        for column in range(3):
            part = weight[128 * row : 128 * row + 128, 128 * column : 128 * column + 128]
            assert qtensor.scale[row, column] == part.abs().max() / 448


@pytest.mark.parametrize("scheme", CASES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tensors_are_as_announced(scheme: QuantScheme, shape: tuple[int, int]) -> None:
    _, qtensor = make(scheme, shape, torch.bfloat16)
    encoded = FORMAT.encode(qtensor)
    announced = FORMAT.tensors(shape, scheme, torch.bfloat16)
    assert encoded.keys() == announced.keys()
    for suffix, spec in announced.items():
        assert tuple(encoded[suffix].shape) == spec.shape
        assert encoded[suffix].dtype == spec.dtype
        assert encoded[suffix].is_contiguous()
    assert FORMAT.layer_shape(encoded) == shape


@pytest.mark.parametrize("name", ["FP8_DYNAMIC", "FP8_BLOCK"])
def test_our_presets_are_the_packages_presets(name: str) -> None:
    scheme = PRESETS[name.lower()]
    section = FORMAT.quantization_config([SchemeGroup(targets=("Linear",), scheme=scheme)], [])
    read = QuantizationScheme.model_validate(section["config_groups"]["group_0"])
    assert read.weights == PRESET_SCHEMES[name]["weights"]
    assert read.input_activations == PRESET_SCHEMES[name]["input_activations"]
    assert read.format == "float-quantized"


def test_the_static_preset_is_the_packages_but_for_its_observer() -> None:
    """The observer only says how the package would calibrate; the tensors do not depend on it."""
    section = FORMAT.quantization_config([SchemeGroup(targets=("Linear",), scheme=STATIC)], [])
    read = QuantizationScheme.model_validate(section["config_groups"]["group_0"])
    theirs = PRESET_SCHEMES["FP8"]
    assert read.weights == theirs["weights"]
    assert read.input_activations is not None
    ours = read.input_activations.model_copy(update={"observer": "static_minmax"})
    assert ours == theirs["input_activations"]


def test_we_read_a_layer_that_the_package_calibrated_and_compressed() -> None:
    """Scale and zero point tensors as the package makes them for a module, symmetric ones gone."""
    linear = torch.nn.Linear(64, 48, bias=False)
    initialize_module_for_quantization(linear, oracle_scheme(STATIC))
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(2))
    for name, value, quant in (
        ("input", x, STATIC.activation),
        ("weight", linear.weight.detach(), STATIC.weight),
    ):
        assert quant is not None
        low, high = value.amin().reshape(1), value.amax().reshape(1)
        scale, _ = calculate_qparams(low, high, oracle_arguments(quant))
        getattr(linear, f"{name}_scale").data = scale
    with torch.no_grad():
        want = linear(x)
    compress_module(linear)
    stored = {n: p.data for n, p in linear.state_dict().items()}
    assert {n: tuple(t.shape) for n, t in stored.items()} == {
        n: s.shape for n, s in FORMAT.tensors((48, 64), STATIC, torch.float32).items()
    }
    qtensor = FORMAT.decode(stored, STATIC)
    ours = Linear(64, 48)
    ours.load_quantized(qtensor, None, torch.float32, STATIC.activation)
    assert torch.allclose(ours(x), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scheme", CASES)
def test_we_read_the_packages_config(scheme: QuantScheme) -> None:
    written = QuantizationConfig(
        config_groups={"group_0": oracle_scheme(scheme)},
        ignore=["lm_head"],
        format="float-quantized",
        quantization_status="compressed",
    ).model_dump()
    assert format_of_config(written) is FORMAT
    layout = FORMAT.parse_config(written)
    assert [group.scheme for group in layout.groups] == [scheme]
    assert layout.ignore == ("lm_head",)


def test_our_config_is_read_back() -> None:
    groups = (
        SchemeGroup(targets=("re:.*mlp.*",), scheme=BLOCK),
        SchemeGroup(targets=("Linear",), scheme=CHANNEL),
    )
    assert FORMAT.parse_config(FORMAT.quantization_config(groups, ())).groups == groups


def broken(owner: str, **changes: Any) -> dict[str, Any]:
    config = FORMAT.quantization_config([SchemeGroup(targets=("Linear",), scheme=CHANNEL)], ())
    config["config_groups"]["group_0"][owner].update(changes)
    return config


@pytest.mark.parametrize(
    ("owner", "changes", "error", "says"),
    [
        ("weights", {"type": "int"}, UnsupportedError, "int8-channel-sym"),
        ("weights", {"num_bits": 4}, UnsupportedError, "fp4-channel"),
        ("weights", {"symmetric": False}, CheckpointError, "weights: float codes are symmetric"),
        ("weights", {"strategy": "group", "group_size": 32}, UnsupportedError, "fp8-g32"),
        ("weights", {"strategy": "block"}, CheckpointError, "block_shape None"),
        (
            "weights",
            {"strategy": "block", "block_structure": [128, 0]},
            CheckpointError,
            "block_structure is .128, 0.",
        ),
        (
            "input_activations",
            {"strategy": "tensor"},
            UnsupportedError,
            "fp8-channel.fp8-tensor-dynamic of targets Linear",
        ),
        ("input_activations", {"type": "int"}, UnsupportedError, "int8-token"),
    ],
)
def test_a_config_that_we_cannot_read_says_why(
    owner: str, changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        FORMAT.parse_config(broken(owner, **changes))


def test_the_format_holds_fp8_and_nothing_else() -> None:
    for name, scheme in PRESETS.items():
        assert FORMAT.matches(scheme) == name.startswith("fp8"), name
    assert format_for(CHANNEL) is format_for(BLOCK) is FORMAT
    qtensor = quantize(torch.randn(4, 8), TensorQuant(num_bits=8, granularity="channel"))
    with pytest.raises(UnsupportedError, match="cannot hold weight scheme int8-channel-sym"):
        FORMAT.encode(qtensor)


NAN_CODES = torch.full((33, 64), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("suffix", "tensor", "says"),
    [
        ("weight", None, "weight is missing"),
        ("weight_scale", None, "weight_scale is missing"),
        ("weight", torch.zeros(33, 64), "weight is torch.float32"),
        ("weight", torch.zeros(33), r"weight is \[33\]; expected two dimensions"),
        ("weight", NAN_CODES, "weight holds 2112 values that are NaN"),
        ("weight_scale", torch.ones(33), r"weight_scale .*\[33\]; .* needs .*\[33, 1\]"),
        ("weight_scale", torch.ones(33, 1).to(torch.float8_e4m3fn), "weight_scale is torch.float8"),
    ],
)
def test_a_malformed_layer_says_what_is_wrong(
    suffix: str, tensor: torch.Tensor | None, says: str
) -> None:
    tensors = FORMAT.encode(make(CHANNEL, (33, 64))[1])
    if tensor is None:
        del tensors[suffix]
    else:
        tensors[suffix] = tensor
    with pytest.raises(CheckpointError, match=says):
        FORMAT.decode(tensors, CHANNEL)


@pytest.mark.parametrize(
    ("scheme", "scale", "says"),
    [
        (CHANNEL, torch.ones(1), "input_scale is there, but scheme fp8-channel.fp8-token-dynamic"),
        (STATIC, None, "input_scale is missing"),
        (STATIC, torch.ones(2), r"input_scale is \[2\]; .* needs \[1\]"),
        (STATIC, torch.zeros(1), r"input_scale is 0\.0; expected a finite number above 0"),
        (STATIC, torch.tensor([float("nan")]), "input_scale is nan"),
        (STATIC, torch.ones(1).to(torch.int8), "input_scale is torch.int8"),
    ],
)
def test_a_wrong_input_scale_says_what_is_wrong(
    scheme: QuantScheme, scale: torch.Tensor | None, says: str
) -> None:
    tensors = FORMAT.encode(make(scheme, (33, 64))[1])
    tensors.pop("input_scale", None)
    if scale is not None:
        tensors["input_scale"] = scale
    with pytest.raises(CheckpointError, match=says):
        FORMAT.decode(tensors, scheme)
