"""``mixed-precision``: config as compressed-tensors reads it, layers as their own formats."""

from typing import Any

import pytest
import torch

from quantforge.checkpoint.base import SchemeGroup, format_for, format_for_all, format_of_config
from quantforge.checkpoint.kv_scales import with_kv_cache
from quantforge.checkpoint.mixed import FORMAT
from quantforge.errors import CheckpointError, UnsupportedError
from quantforge.qtensor import quantize
from quantforge.schemes import KV_CACHES, PRESETS, QuantScheme, with_group_size

W4 = with_group_size(PRESETS["w4a16"], 32)
W8, FP8 = PRESETS["w8a16"], PRESETS["fp8_dynamic"]
GROUPS = [
    SchemeGroup(targets=(r"re:model\.layers\.\d+\.(mlp\.down_proj)$",), scheme=FP8),
    SchemeGroup(targets=("model.layers.0.self_attn.o_proj", "lm_head"), scheme=W4),
    SchemeGroup(targets=(r"re:model\.layers\.(1|3)\.(self_attn\.o_proj)$",), scheme=W8),
]


def config(**changes: Any) -> dict[str, Any]:
    return FORMAT.quantization_config(GROUPS, ("model.layers.2.self_attn.o_proj",)) | changes


def test_the_config_is_one_that_compressed_tensors_parses() -> None:
    from compressed_tensors.quantization import QuantizationConfig

    section = {k: v for k, v in config().items() if k != "quant_method"}
    parsed = QuantizationConfig.model_validate(section)
    assert parsed.format == "mixed-precision"
    groups = list(parsed.config_groups.values())
    formats = ["float-quantized", "pack-quantized", "pack-quantized"]
    assert [str(group.format) for group in groups] == formats
    assert [group.weights.num_bits for group in groups] == [8, 4, 8]
    assert groups[0].input_activations is not None


def test_parsing_is_the_inverse_of_writing() -> None:
    layout = format_of_config(config()).parse_config(config())
    assert layout.format == "mixed-precision"
    assert list(layout.groups) == GROUPS
    assert layout.ignore == ("model.layers.2.self_attn.o_proj",)


@pytest.mark.parametrize("name", ["none", "fp8", "int8"])
def test_the_scales_of_the_kv_cache_are_known(name: str) -> None:
    section = with_kv_cache(config(), KV_CACHES[name])
    assert format_of_config(section).parse_config(section).kv_cache == KV_CACHES[name]


@pytest.mark.parametrize(
    ("schemes", "name"),
    [
        ([W4], "pack-quantized"),
        ([W4, W8], "pack-quantized"),
        ([FP8, PRESETS["fp8_block"]], "float-quantized"),
        ([W4, FP8], "mixed-precision"),
    ],
)
def test_only_several_formats_are_mixed(schemes: list[QuantScheme], name: str) -> None:
    assert format_for_all(schemes).name == name


def test_one_format_is_not_mixed() -> None:
    with pytest.raises(UnsupportedError, match="all layers are in format pack-quantized"):
        FORMAT.quantization_config(GROUPS[1:], ())


def test_a_single_scheme_is_never_in_the_composite_format() -> None:
    assert {format_for(s).name for s in PRESETS.values()} & {FORMAT.name} == set()


@pytest.mark.parametrize("scheme", [W4, W8, FP8], ids=str)
def test_a_layer_lies_as_its_own_format_has_it(scheme: QuantScheme) -> None:
    qtensor = quantize(torch.randn(32, 64), scheme.weight)
    own = format_for(scheme)
    encoded = FORMAT.encode(qtensor)
    assert {n: (tuple(t.shape), t.dtype) for n, t in encoded.items()} == {
        n: (s.shape, s.dtype) for n, s in own.tensors((32, 64), scheme, torch.float32).items()
    }
    assert FORMAT.tensors((32, 64), scheme, torch.float32) == own.tensors(
        (32, 64), scheme, torch.float32
    )
    assert FORMAT.layer_shape(encoded) == (32, 64)
    assert torch.equal(FORMAT.decode(encoded, scheme).dequantize(), qtensor.dequantize())


def test_a_group_without_a_format_is_refused() -> None:
    groups = {"group_0": config()["config_groups"]["group_0"] | {"format": None}}
    damaged = config(config_groups=groups)
    with pytest.raises(CheckpointError, match="group_0 names no format"):
        format_of_config(damaged).parse_config(damaged)


@pytest.mark.parametrize("own", ["mixed-precision", "marlin-24"])
def test_a_group_of_an_unknown_format_is_refused(own: str) -> None:
    groups = dict(config()["config_groups"])
    groups["group_0"] = groups["group_0"] | {"format": own}
    damaged = config(config_groups=groups)
    with pytest.raises(UnsupportedError, match=own):
        format_of_config(damaged).parse_config(damaged)


def test_tensors_of_no_format_are_refused() -> None:
    with pytest.raises(CheckpointError, match="odd"):
        FORMAT.layer_shape({"odd": torch.zeros(2)})
