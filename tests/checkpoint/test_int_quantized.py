"""The int-quantized format against the compressed-tensors package, both ways."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.naive_quantized.base import IntQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.quantization.utils import calculate_qparams

from quantforge.checkpoint.base import SchemeGroup, format_for, format_of_config
from quantforge.checkpoint.int_quantized import FORMAT
from quantforge.errors import CheckpointError, UnsupportedError
from quantforge.qtensor import QuantizedTensor, quantize
from quantforge.schemes import PRESETS, QuantScheme, TensorQuant

DYNAMIC, STATIC = PRESETS["w8a8_int8"], PRESETS["w8a8_int8_static"]
CHANNEL = PRESETS["w8a16"]
GROUP = QuantScheme(weight=TensorQuant(num_bits=8, granularity="group", group_size=32))
CASES = [pytest.param(s, id=str(s)) for s in (DYNAMIC, STATIC, CHANNEL, GROUP)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = ((48, 64), (33, 96), (1, 32))


def oracle_arguments(quant: TensorQuant) -> QuantizationArgs:
    return QuantizationArgs(
        num_bits=8,
        type="int",
        symmetric=quant.symmetric,
        strategy=quant.granularity,
        group_size=quant.group_size,
        dynamic=quant.dynamic,
    )


def oracle_scheme(scheme: QuantScheme) -> QuantizationScheme:
    return QuantizationScheme(
        targets=["Linear"],
        weights=oracle_arguments(scheme.weight),
        input_activations=scheme.activation and oracle_arguments(scheme.activation),
        format="int-quantized",
    )


def make(
    scheme: QuantScheme, shape: tuple[int, int], dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, QuantizedTensor]:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(7)) / 3
    qtensor = quantize(weight, scheme.weight, scale_dtype=dtype)
    if scheme.has_static_inputs:
        qtensor = replace(qtensor, input_scale=torch.tensor([0.0371], dtype=dtype))
    return weight, qtensor


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize("scheme", CASES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_encoded_tensors_equal_the_packages_compress(
    scheme: QuantScheme, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight, qtensor = make(scheme, shape, dtype)
    encoded = FORMAT.encode(qtensor)
    state = {"weight": weight} | {n: t for n, t in encoded.items() if n.endswith("_scale")}
    expected = IntQuantizationCompressor.compress(state, oracle_scheme(scheme))
    assert encoded.keys() == expected.keys()
    for suffix, tensor in expected.items():
        assert same(encoded[suffix], tensor), suffix


@pytest.mark.parametrize("scheme", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_packages_decompress_gives_our_weight(scheme: QuantScheme, dtype: torch.dtype) -> None:
    tensors = FORMAT.encode(make(scheme, (33, 96), dtype)[1])
    expected = IntQuantizationCompressor.decompress(tensors, oracle_scheme(scheme))["weight"]
    assert same(FORMAT.decode(tensors, scheme).dequantize(), expected)


@pytest.mark.parametrize("scheme", CASES)
def test_decode_undoes_encode(scheme: QuantScheme) -> None:
    _, qtensor = make(scheme, (33, 96), torch.bfloat16)
    decoded = FORMAT.decode(FORMAT.encode(qtensor), scheme)
    assert same(decoded.codes, qtensor.codes)
    assert same(decoded.scale, qtensor.scale)
    assert (decoded.quant, decoded.zero_point) == (scheme.weight, None)
    if qtensor.input_scale is not None:
        assert decoded.input_scale is not None
        assert same(decoded.input_scale, qtensor.input_scale)


def test_scales_of_channels_are_those_of_the_package() -> None:
    weight, qtensor = make(DYNAMIC, (33, 96))
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    expected, _ = calculate_qparams(low, high, oracle_arguments(DYNAMIC.weight))
    assert torch.equal(qtensor.scale, expected)


@pytest.mark.parametrize("scheme", CASES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tensors_are_as_announced(scheme: QuantScheme, shape: tuple[int, int]) -> None:
    encoded = FORMAT.encode(make(scheme, shape, torch.bfloat16)[1])
    announced = FORMAT.tensors(shape, scheme, torch.bfloat16)
    assert {n: (tuple(t.shape), t.dtype) for n, t in encoded.items()} == {
        n: (spec.shape, spec.dtype) for n, spec in announced.items()
    }
    assert all(t.is_contiguous() for t in encoded.values())
    assert FORMAT.layer_shape(encoded) == shape


def test_our_preset_is_the_packages_preset() -> None:
    section = FORMAT.quantization_config([SchemeGroup(targets=("Linear",), scheme=DYNAMIC)], [])
    read = QuantizationScheme.model_validate(section["config_groups"]["group_0"])
    assert read.weights == PRESET_SCHEMES["W8A8"]["weights"]
    assert read.input_activations == PRESET_SCHEMES["W8A8"]["input_activations"]
    assert read.format == "int-quantized"


@pytest.mark.parametrize("scheme", CASES)
@pytest.mark.parametrize("name", ["int-quantized", "naive-quantized"])
def test_we_read_the_packages_config(scheme: QuantScheme, name: str) -> None:
    group = oracle_scheme(scheme)
    group.format = name
    written = QuantizationConfig(
        config_groups={"group_0": group},
        ignore=["lm_head"],
        format=name,
        quantization_status="compressed",
    ).model_dump()
    assert format_of_config(written) is FORMAT
    layout = FORMAT.parse_config(written)
    assert [g.scheme for g in layout.groups] == [scheme]
    assert layout.ignore == ("lm_head",)


def broken(owner: str, **changes: Any) -> dict[str, Any]:
    config = FORMAT.quantization_config([SchemeGroup(targets=("Linear",), scheme=DYNAMIC)], ())
    config["config_groups"]["group_0"][owner].update(changes)
    return config


@pytest.mark.parametrize(
    ("owner", "changes", "says"),
    [
        ("weights", {"type": "float"}, "fp8-channel"),
        ("weights", {"num_bits": 4}, "int4-channel-sym"),
        ("weights", {"symmetric": False}, "int8-channel-asym"),
        ("weights", {"strategy": "group", "group_size": 32}, r"int8-g32-sym\+int8-token"),
        ("input_activations", {"strategy": "tensor"}, "int8-tensor-sym-dynamic"),
        ("input_activations", {"dynamic": False}, "int8-token-sym of targets"),
        ("input_activations", {"symmetric": False}, "int8-token-asym-dynamic"),
        ("input_activations", {"type": "float"}, "fp8-token-dynamic"),
    ],
)
def test_a_config_that_we_cannot_read_says_why(
    owner: str, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(UnsupportedError, match=says):
        FORMAT.parse_config(broken(owner, **changes))


def test_int8_inputs_go_here_and_weights_alone_into_the_packed_format() -> None:
    assert format_for(DYNAMIC) is format_for(STATIC) is FORMAT
    assert format_for(CHANNEL).name == format_for(GROUP).name == "pack-quantized"
    qtensor = quantize(torch.randn(4, 8), TensorQuant(num_bits=4, granularity="channel"))
    with pytest.raises(UnsupportedError, match="cannot hold weight scheme int4-channel-sym"):
        FORMAT.encode(qtensor)


@pytest.mark.parametrize(
    ("suffix", "tensor", "says"),
    [
        ("weight", None, "weight is missing"),
        ("weight_scale", None, "weight_scale is missing"),
        ("input_scale", None, "input_scale is missing"),
        ("weight", torch.zeros(33, 64), "weight is torch.float32"),
        ("weight", torch.zeros(33), r"weight is \[33\]; expected two dimensions"),
        ("weight_scale", torch.ones(33), r"weight_scale .*\[33\]; .* needs .*\[33, 1\]"),
        ("input_scale", torch.full((1,), torch.inf), "input_scale is inf"),
    ],
)
def test_a_malformed_layer_says_what_is_wrong(
    suffix: str, tensor: torch.Tensor | None, says: str
) -> None:
    tensors = FORMAT.encode(make(STATIC, (33, 64))[1])
    if tensor is None:
        del tensors[suffix]
    else:
        tensors[suffix] = tensor
    with pytest.raises(CheckpointError, match=says):
        FORMAT.decode(tensors, STATIC)


def test_a_group_that_does_not_divide_is_refused() -> None:
    tensors = FORMAT.encode(make(CHANNEL, (33, 60))[1])
    with pytest.raises(CheckpointError, match="group_size 32 does not divide in_features 60"):
        FORMAT.decode(tensors, GROUP)
