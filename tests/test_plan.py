"""What a plan decides and refuses, before any weight is read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantforge.checkpoint.reader import CheckpointReader
from quantforge.errors import CheckpointError, RecipeError, UnsupportedError
from quantforge.plan import QuantizePlan, merge_units, plan_quantization
from quantforge.recipe import LayerSection, QuantizeSection, parse_recipe
from quantforge.schemes import PRESETS

TinyModel = Callable[..., Path]
LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def plan(folder: Path, **section: Any) -> QuantizePlan:
    return plan_quantization(CheckpointReader(folder), QuantizeSection(**section))


@pytest.fixture
def no_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: CheckpointReader, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(CheckpointReader, "tensor", refuse)


@pytest.mark.parametrize(
    ("hidden", "intermediate", "size"),
    [(128, 256, 128), (128, 192, 64), (64, 128, 64), (64, 160, 32), (96, 128, 32)],
)
@pytest.mark.usefixtures("no_weight_is_read")
def test_auto_takes_the_largest_group_that_divides_every_layer(
    hidden: int, intermediate: int, size: int, tiny_model: TinyModel
) -> None:
    folder = tiny_model(hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=1)
    found = plan(folder)
    assert found.scheme.weight.group_size == size
    assert {scheme.weight.group_size for scheme in found.layers.values()} == {size}


def test_auto_without_a_fitting_group_says_what_to_do(tiny_model: TinyModel) -> None:
    folder = tiny_model(intermediate_size=100)
    with pytest.raises(RecipeError, match=r"no group size of \(128, 64, 32\) .*channel"):
        plan(folder)
    assert plan(folder, group_size="channel").scheme.weight.granularity == "channel"
    assert plan(folder, ignore=("lm_head", "down_proj")).scheme.weight.group_size == 64


def test_auto_leaves_a_channel_scheme_alone(tiny_model: TinyModel) -> None:
    assert plan(tiny_model(), scheme="w8a16").scheme == PRESETS["w8a16"]


@pytest.mark.usefixtures("no_weight_is_read")
def test_a_group_size_that_does_not_divide_names_the_layer_and_divisors(
    tiny_model: TinyModel,
) -> None:
    with pytest.raises(RecipeError) as caught:
        plan(tiny_model(), group_size=128)
    message = str(caught.value)
    assert "group_size 128 does not divide in_features 64" in message
    assert "model.layers.0.self_attn.q_proj" in message
    assert "11 other layers" in message
    assert "64 or 32" in message


@pytest.mark.parametrize("size", ["big", "1.5", "0", "-32"])
def test_group_sizes_that_are_none_are_refused(size: str, tiny_model: TinyModel) -> None:
    with pytest.raises(RecipeError, match=size):
        plan(tiny_model(), group_size=size)


def test_symmetric_overrides_the_scheme(tiny_model: TinyModel) -> None:
    folder = tiny_model()
    assert not plan(folder).scheme.weight.symmetric
    assert plan(folder, symmetric=True).scheme.weight.symmetric
    assert not plan(folder, scheme="w4a16_sym", symmetric=False).scheme.weight.symmetric


def test_by_default_every_linear_of_the_blocks_is_quantized(tiny_model: TinyModel) -> None:
    found = plan(tiny_model())
    assert set(found.layers) == {f"model.layers.{i}.{n}" for i in range(2) for n in LINEARS}
    assert found.ignore == ("lm_head",)
    assert not found.quantizes_lm_head
    assert set(found.block_linears(1)) == set(LINEARS)


@pytest.mark.parametrize(
    ("ignore", "left"),
    [
        ((), 15),
        (("lm_head",), 14),
        (("down_proj", "lm_head"), 12),
        (("model.layers.0.*", "lm_head"), 7),
        (("*.mlp.*",), 9),
        (("model.layers.1.self_attn.q_proj",), 14),
    ],
)
def test_ignored_linears_are_named_globbed_or_named_by_their_last_part(
    ignore: tuple[str, ...], left: int, tiny_model: TinyModel
) -> None:
    found = plan(tiny_model(), ignore=ignore)
    assert len(found.layers) == left
    assert len(found.layers) + len(found.ignore) == 15
    assert not set(found.layers) & set(found.ignore)


def test_patterns_that_match_nothing_or_everything_are_refused(tiny_model: TinyModel) -> None:
    folder = tiny_model()
    with pytest.raises(RecipeError, match="'dwn_proj' matches no linear"):
        plan(folder, ignore=("dwn_proj",))
    with pytest.raises(RecipeError, match="leaves nothing"):
        plan(folder, ignore=("*",))


def test_a_quantized_model_is_refused(
    tiny_model: TinyModel, quantized_model: Callable[..., Path]
) -> None:
    folder = quantized_model(tiny_model(), lambda _: PRESETS["w8a16"])
    with pytest.raises(UnsupportedError, match=r"quantized already \(pack-quantized\)"):
        plan(folder)


@pytest.mark.parametrize(
    ("section", "kind", "reason"),
    [
        ({"method": "awk"}, UnsupportedError, "unknown method 'awk' .did you mean 'awq'.*rtn"),
        ({"scheme": "w4a6"}, RecipeError, "unknown scheme 'w4a6' .did you mean 'w4a16'"),
        ({"options": {"clp": True}}, RecipeError, "unknown option 'clp' .did you mean 'clip'"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(
    section: dict[str, Any], kind: type[Exception], reason: str, tiny_model: TinyModel
) -> None:
    with pytest.raises(kind, match=reason):
        plan(tiny_model(), **section)


def test_a_weight_of_a_wrong_shape_is_refused_by_name(tiny_model: TinyModel) -> None:
    folder = tiny_model()
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    for shape in ((-1,), (64, 128)):
        changed = tensors | {name: tensors[name].reshape(shape).contiguous()}
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=name):
            plan(folder)
    save_file({k: v for k, v in tensors.items() if k != name}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        plan(folder)


def test_a_layer_that_the_architecture_does_not_have_is_refused(tiny_model: TinyModel) -> None:
    folder = tiny_model()
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    tensors[name] = torch.zeros(8, 64)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedError, match=rf"{name} \[8, 64\] belongs to no layer"):
        plan(folder)


def test_buffers_of_old_checkpoints_are_planned_as_they_are(tiny_model: TinyModel) -> None:
    """Llama 2 has one such tensor in every block, which nothing reads."""
    folder = tiny_model()
    before = plan(folder).planned_bytes
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    save_file(tensors | {name: torch.ones(8)}, folder / "model.safetensors", {"format": "pt"})
    assert plan(folder).extra == (name,)
    assert plan(folder).planned_bytes == before + 8 * 4


@pytest.mark.parametrize("tied", [False, True])
def test_planned_bytes_count_codes_scales_and_what_stays(tied: bool, tiny_model: TinyModel) -> None:
    """float32, 4 bits in groups of 64: by hand, [N, K] takes N (K/2 + 4 K/64 + K/128) + 16 bytes
    (int32-packed codes, float32 scales, zero points packed eight to an int32; the int64 shape)."""
    folder = tiny_model(tie_word_embeddings=tied)
    shapes = [(64, 64), (32, 64), (32, 64), (64, 64), (128, 64), (128, 64), (64, 128)]
    head = (512, 64)

    def packed(shapes: list[tuple[int, int]]) -> int:
        return sum(n * k // 2 + 4 * n * k // 64 + n * (k // 64) // 2 + 16 for n, k in shapes)

    dense = 4 * (512 * 64 + 5 * 64)
    blocks = packed(shapes * 2)
    lm_head = 0 if tied else 4 * 512 * 64
    assert plan(folder).planned_bytes == dense + blocks + lm_head
    assert plan(folder, ignore=()).planned_bytes == dense + blocks + packed([head])


def names(scheme: str, found: QuantizePlan) -> set[str]:
    return {name for name, own in found.layers.items() if str(own) == scheme}


def test_a_pattern_gives_layers_a_scheme_of_their_own(tiny_model: TinyModel) -> None:
    layers = {"down_proj": LayerSection(scheme="w8a16"), "*.0.*o_proj": LayerSection(group_size=32)}
    found = plan(tiny_model(), layers=layers)
    down = {f"model.layers.{i}.mlp.down_proj" for i in range(2)}
    assert names("int8-channel-sym", found) == down
    assert names("int4-g32-asym", found) == {"model.layers.0.self_attn.o_proj"}
    assert len(names("int4-g64-asym", found)) == 11
    assert found.scheme_name == "int4-g64-asym + int8-channel-sym + int4-g32-asym"
    assert found.format.name == "pack-quantized"


def test_the_last_pattern_counts_and_inherits_what_it_does_not_say(tiny_model: TinyModel) -> None:
    layers = {"*.down_proj": LayerSection(scheme="w8a16"), "*.1.*": LayerSection(symmetric=True)}
    found = plan(tiny_model(), group_size=32, layers=layers)
    assert names("int8-channel-sym", found) == {"model.layers.0.mlp.down_proj"}
    assert names("int4-g32-sym", found) == {f"model.layers.1.{n}" for n in LINEARS}


def test_the_group_size_of_the_rest_need_not_fit_a_pattern(tiny_model: TinyModel) -> None:
    found = plan(
        tiny_model(intermediate_size=100), layers={"down_proj": LayerSection(scheme="w8a16")}
    )
    assert found.scheme.weight.group_size == 64


def test_formats_are_mixed_where_schemes_need_several(tiny_model: TinyModel) -> None:
    found = plan(
        tiny_model(), method="rtn", layers={"down_proj": LayerSection(scheme="fp8_dynamic")}
    )
    assert found.format.name == "mixed-precision"
    assert found.format_of("model.layers.0.mlp.down_proj").name == "float-quantized"
    assert found.format_of("model.layers.0.mlp.up_proj").name == "pack-quantized"


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"layers": {"dwn": LayerSection(scheme="w8a16")}}, "layers: 'dwn' matches no linear"),
        ({"layers": {"lm_head": LayerSection(scheme="w8a16")}}, "'lm_head' matches only linears"),
        ({"layers": {"*.0.*": LayerSection(group_size=48)}}, "48 does not divide in_features 64"),
        (
            {"layers": {"*.0.*": LayerSection(scheme="w9")}},
            r"layers: '\*.0.\*': unknown scheme 'w9'",
        ),
        (
            {"layers": {"v_proj": LayerSection(scheme="w8a16")}},
            "q_proj is int4-g64-asym, but .*0.self_attn.v_proj is int8-.* join q_proj, k_proj",
        ),
        ({"layers": {"up_proj": LayerSection(group_size=32)}}, "join gate_proj, up_proj"),
        (
            {"layers": {"o_proj": LayerSection(scheme="fp8_dynamic")}},
            "awq does not round to float8 codes, which scheme fp8-channel",
        ),
    ],
)
@pytest.mark.usefixtures("no_weight_is_read")
def test_schemes_that_cannot_be_mixed_are_refused(
    section: dict[str, Any], reason: str, tiny_model: TinyModel
) -> None:
    with pytest.raises(RecipeError, match=reason):
        plan(tiny_model(), **section)


def test_units_are_what_runtimes_join(tiny_model: TinyModel) -> None:
    found = plan(tiny_model(), ignore=("lm_head", "model.layers.1.*"))
    units = merge_units(found.layers, found.architecture, found.config)
    assert [tuple(n.rsplit(".", 1)[-1] for n in unit) for unit in units] == [
        ("q_proj", "k_proj", "v_proj"),
        ("o_proj",),
        ("gate_proj", "up_proj"),
        ("down_proj",),
    ]


def test_a_pattern_of_a_recipe_has_known_keys() -> None:
    document = {"quantize": {"layers": {"down_proj": {"schem": "w8a16"}}}}
    with pytest.raises(RecipeError, match=r"layers: down_proj: unknown key 'schem' .*'scheme'"):
        parse_recipe(document, source="given")
