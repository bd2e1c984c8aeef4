"""The pack-quantized format against the compressed-tensors package."""

from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.utils.match import is_match, match_targets

from quantforge.checkpoint.base import SchemeGroup, format_for, format_of_config
from quantforge.checkpoint.compressed_tensors import FORMAT
from quantforge.errors import CheckpointError, UnsupportedError
from quantforge.qtensor import QuantizedTensor, quantize
from quantforge.schemes import PRESETS, QuantScheme, TensorQuant

SHAPES = ((48, 64), (33, 96), (1, 32), (10, 160))


def scheme_of(num_bits: int, symmetric: bool, group_size: int | None) -> QuantScheme:
    return QuantScheme(
        weight=TensorQuant(
            num_bits=num_bits,
            symmetric=symmetric,
            granularity="group" if group_size else "channel",
            group_size=group_size,
        )
    )


def oracle_scheme(scheme: QuantScheme) -> QuantizationScheme:
    weight = scheme.weight
    arguments = QuantizationArgs(
        num_bits=weight.num_bits,
        type="int",
        symmetric=weight.symmetric,
        strategy=weight.granularity,
        group_size=weight.group_size,
    )
    return QuantizationScheme(targets=["Linear"], weights=arguments, format="pack-quantized")


def make(
    scheme: QuantScheme, shape: tuple[int, int], dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, QuantizedTensor]:
    generator = torch.Generator().manual_seed(7)
    weight = (torch.randn(shape, generator=generator) + 0.2).to(dtype)
    return weight, quantize(weight, scheme.weight)


CASES = [
    pytest.param(scheme_of(bits, symmetric, group), id=str(scheme_of(bits, symmetric, group)))
    for bits in (2, 3, 4, 8)
    for symmetric in (True, False)
    for group in (None, 32)
]


@pytest.mark.parametrize("scheme", CASES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_encoded_tensors_equal_the_packages_compress(
    scheme: QuantScheme, shape: tuple[int, int]
) -> None:
    weight, qtensor = make(scheme, shape)
    state = {"weight": weight, "weight_scale": qtensor.scale}
    if qtensor.zero_point is not None:
        state["weight_zero_point"] = qtensor.zero_point
    expected = PackedQuantizationCompressor.compress(state, oracle_scheme(scheme))
    encoded = FORMAT.encode(qtensor)
    assert encoded.keys() == expected.keys()
    for suffix, tensor in expected.items():
        assert encoded[suffix].dtype == tensor.dtype, suffix
        assert torch.equal(encoded[suffix], tensor), suffix


@pytest.mark.parametrize("scheme", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_packages_decompress_gives_our_weight(scheme: QuantScheme, dtype: torch.dtype) -> None:
    _, qtensor = make(scheme, (33, 96), dtype)
    tensors = FORMAT.encode(qtensor)
    expected = PackedQuantizationCompressor.decompress(tensors, oracle_scheme(scheme))["weight"]
    decoded = FORMAT.decode(tensors, scheme)
    assert torch.equal(decoded.dequantize(), expected)


@pytest.mark.parametrize("scheme", CASES)
def test_decode_undoes_encode(scheme: QuantScheme) -> None:
    _, qtensor = make(scheme, (33, 96), torch.bfloat16)
    decoded = FORMAT.decode(FORMAT.encode(qtensor), scheme)
    assert torch.equal(decoded.codes, qtensor.codes)
    assert torch.equal(decoded.scale, qtensor.scale)
    assert decoded.quant == scheme.weight
    if qtensor.zero_point is None:
        assert decoded.zero_point is None
    else:
        assert decoded.zero_point is not None
        assert torch.equal(decoded.zero_point, qtensor.zero_point)


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
        assert encoded[suffix].nbytes == spec.num_bytes


def test_scale_rules_of_a_known_row() -> None:
    row = torch.tensor([[-1.5, -0.5, 0.25, 3.0]])
    symmetric = quantize(row, TensorQuant(num_bits=4, granularity="channel"))
    asymmetric = quantize(row, TensorQuant(num_bits=4, symmetric=False, granularity="channel"))
    assert symmetric.scale.item() == pytest.approx(0.4)
    assert asymmetric.scale.item() == pytest.approx(0.3)
    assert asymmetric.zero_point is not None
    assert asymmetric.zero_point.item() == -3


@pytest.mark.parametrize("scheme", CASES)
def test_the_package_reads_our_config(scheme: QuantScheme) -> None:
    group = SchemeGroup(targets=("Linear",), scheme=scheme)
    config = FORMAT.quantization_config([group], ["lm_head"])
    parsed = QuantizationConfig.model_validate(
        {k: v for k, v in config.items() if k in QuantizationConfig.model_fields}
    )
    read = parsed.config_groups["group_0"]
    assert isinstance(read, QuantizationScheme)
    assert read.targets == ["Linear"]
    assert parsed.ignore == ["lm_head"]
    assert parsed.format == "pack-quantized"
    assert read.weights is not None
    assert read.weights.num_bits == scheme.weight.num_bits
    assert read.weights.symmetric == scheme.weight.symmetric
    assert read.weights.group_size == scheme.weight.group_size
    assert read.weights.strategy == scheme.weight.granularity


@pytest.mark.parametrize("scheme", CASES)
def test_we_read_the_packages_config(scheme: QuantScheme) -> None:
    written = QuantizationConfig(
        config_groups={"group_0": oracle_scheme(scheme)},
        ignore=["lm_head"],
        format="pack-quantized",
        quantization_status="compressed",
    ).model_dump()
    assert FORMAT.matches_config(written)
    layout = FORMAT.parse_config(written)
    assert [group.scheme for group in layout.groups] == [scheme]
    assert layout.ignore == ("lm_head",)


def test_several_groups_survive_the_config() -> None:
    groups = (
        SchemeGroup(targets=("model.layers.0.mlp.down_proj",), scheme=PRESETS["w8a16"]),
        SchemeGroup(targets=("re:.*self_attn.*", "Linear"), scheme=PRESETS["w4a16"]),
    )
    layout = FORMAT.parse_config(FORMAT.quantization_config(groups, ("lm_head",)))
    assert layout.groups == groups


TARGETS = (
    "Linear",
    "model.layers.0.mlp.down_proj",
    "re:.*mlp",
    "re:.*q_proj$",
    "lm_head",
    "o_proj",
)
LAYERS = ("model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj", "lm_head")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("ignored", [None, *TARGETS])
@pytest.mark.parametrize("layer", LAYERS)
def test_targets_match_as_in_the_package(target: str, ignored: str | None, layer: str) -> None:
    ignore = (ignored,) if ignored else ()
    group = SchemeGroup(targets=(target,), scheme=PRESETS["w4a16"])
    layout = FORMAT.parse_config(FORMAT.quantization_config([group], ignore))
    expected = is_match(layer, torch.nn.Linear(1, 1), [target], list(ignore))
    assert (layout.scheme(layer) is not None) == expected


def test_the_closest_target_wins_as_in_the_package() -> None:
    targets = ("Linear", "re:.*down_proj", "model.layers.0.mlp.down_proj")
    schemes = (PRESETS["w4a16"], PRESETS["w4a16_sym"], PRESETS["w8a16"])
    groups = [SchemeGroup(targets=(t,), scheme=s) for t, s in zip(targets, schemes, strict=True)]
    layout = FORMAT.parse_config(FORMAT.quantization_config(groups, ()))
    for layer in (*LAYERS, "model.layers.1.mlp.down_proj"):
        closest = match_targets(layer, torch.nn.Linear(1, 1), targets)[0]
        assert layout.scheme(layer) == schemes[targets.index(closest)]


def test_every_preset_has_a_format() -> None:
    for scheme in PRESETS.values():
        assert format_for(scheme).matches(scheme)


def test_a_scheme_without_format_is_refused_with_the_known_ones() -> None:
    scheme = QuantScheme(weight=TensorQuant(num_bits=4, dtype="float", granularity="channel"))
    with pytest.raises(UnsupportedError, match=r"fp4-channel.*pack-quantized"):
        format_for(scheme)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "hqq", "bits": 4},
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
        {"quant_method": "awq", "bits": 4, "version": "gemv"},
        {"quant_method": "compressed-tensors", "format": "marlin-24"},
        {},
    ],
)
def test_a_foreign_config_is_refused_with_the_known_formats(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="pack-quantized"):
        format_of_config(config)


def broken(**changes: Any) -> dict[str, Any]:
    group = SchemeGroup(targets=("Linear",), scheme=PRESETS["w4a16"])
    config = FORMAT.quantization_config([group], ())
    first = config["config_groups"]["group_0"]
    for key, value in changes.items():
        owner = first if key in first else first["weights"] if key != "ignore" else config
        owner[key] = value
    return config


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"num_bits": 5}, CheckpointError, "num_bits 5"),
        ({"num_bits": "4"}, CheckpointError, "num_bits 4"),
        ({"group_size": "64"}, CheckpointError, "group_0"),
        ({"strategy": "rows"}, CheckpointError, "granularity 'rows'"),
        ({"strategy": "tensor", "group_size": None}, UnsupportedError, "int4-tensor"),
        ({"actorder": "group"}, UnsupportedError, "actorder 'group'"),
        ({"input_activations": {"num_bits": 8}}, UnsupportedError, "scheme int4-g128-asym.int8-"),
        ({"input_activations": 8}, CheckpointError, "input_activations is 8"),
        ({"output_activations": {"num_bits": 8}}, UnsupportedError, "output_activations"),
        ({"weights": None}, CheckpointError, "weights is None"),
        ({"targets": "Linear"}, CheckpointError, "list of strings"),
        ({"targets": ["re:("]}, CheckpointError, "no pattern"),
        ({"ignore": [3]}, CheckpointError, "ignore"),
    ],
)
def test_a_broken_config_says_what_is_wrong(
    changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says.replace("(", r"\(")):
        FORMAT.parse_config(broken(**changes))


def test_missing_groups_are_refused() -> None:
    with pytest.raises(CheckpointError, match="config_groups"):
        FORMAT.parse_config({"format": "pack-quantized"})


@pytest.mark.parametrize(
    ("suffix", "tensor", "says"),
    [
        ("weight_packed", None, "weight_packed is missing"),
        ("weight_zero_point", None, "weight_zero_point is missing"),
        ("weight_packed", torch.zeros(33, 11, dtype=torch.int32), r"weight_packed .*\[33, 11\]"),
        ("weight_packed", torch.zeros(33, 12), "weight_packed is torch.float32"),
        ("weight_scale", torch.ones(33), r"weight_scale .*\[33\]"),
        ("weight_scale", torch.ones(33, 3, dtype=torch.int8), "weight_scale is torch.int8"),
        ("weight_shape", torch.tensor([33, 95]), "group_size 32 does not divide"),
        ("weight_shape", torch.tensor([0, 96]), r"\[0, 96\]"),
        ("weight_shape", torch.tensor([33.0, 96.0]), "weight_shape is torch.float32"),
    ],
)
def test_a_malformed_layer_says_what_is_wrong(
    suffix: str, tensor: torch.Tensor | None, says: str
) -> None:
    scheme = scheme_of(4, symmetric=False, group_size=32)
    tensors = FORMAT.encode(make(scheme, (33, 96))[1])
    if tensor is None:
        del tensors[suffix]
    else:
        tensors[suffix] = tensor
    with pytest.raises(CheckpointError, match=says):
        FORMAT.decode(tensors, scheme)


def test_activation_order_is_refused() -> None:
    scheme = scheme_of(4, symmetric=True, group_size=32)
    tensors = FORMAT.encode(make(scheme, (33, 96))[1])
    tensors["weight_g_idx"] = torch.zeros(96, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="weight_g_idx"):
        FORMAT.decode(tensors, scheme)
