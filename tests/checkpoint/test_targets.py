"""Targets give each layer its scheme under every reader's rules, and stay few."""

import re
from typing import Any

import pytest
from compressed_tensors.utils.match import match_name
from hypothesis import given, settings
from hypothesis import strategies as st

from quantforge.checkpoint.base import QuantizationLayout
from quantforge.checkpoint.targets import scheme_groups
from quantforge.schemes import PRESETS, QuantScheme, with_group_size

SCHEMES = [with_group_size(PRESETS["w4a16"], size) for size in (32, 64)]
SCHEMES += [PRESETS["w8a16"], PRESETS["fp8_dynamic"]]
UNITS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
MERGED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""What vLLM joins, by the name of the joined module."""


@st.composite
def assignments(draw: Any, num_blocks: int = 12) -> dict[str, QuantScheme | None]:
    """A scheme, or None for a dense one, of every unit of a model and of lm_head."""
    pool = st.sampled_from([*SCHEMES, None])
    layers: dict[str, QuantScheme | None] = {"lm_head": draw(pool)}
    for block in range(num_blocks):
        for unit in UNITS:
            scheme = draw(pool)
            layers |= {f"model.layers.{block}.{name}": scheme for name in unit}
    return layers


def split(layers: dict[str, QuantScheme | None]) -> tuple[dict[str, QuantScheme], list[str]]:
    quantized = {name: scheme for name, scheme in layers.items() if scheme is not None}
    return quantized, [name for name, scheme in layers.items() if scheme is None]


@settings(deadline=None, max_examples=30)
@given(assignments())
def test_every_layer_has_its_scheme_under_our_rule(layers: dict[str, QuantScheme | None]) -> None:
    quantized, dense = split(layers)
    if not quantized:
        return
    groups = tuple(scheme_groups(quantized, dense))
    layout = QuantizationLayout(format="any", groups=groups, ignore=tuple(dense))
    assert {name: layout.scheme(name) for name in layers} == layers


@settings(deadline=None, max_examples=30)
@given(assignments())
def test_at_most_one_target_matches_a_layer_whatever_the_order(
    layers: dict[str, QuantScheme | None],
) -> None:
    quantized, dense = split(layers)
    if len(set(quantized.values())) < 2:
        return
    targets = {t: g.scheme for g in scheme_groups(quantized, dense) for t in g.targets}
    assert all(t.startswith("re:") or t in layers for t in targets)
    for name, scheme in layers.items():
        found = [targets[t] for t in targets if match_name(name, t)]
        assert found == ([] if scheme is None else [scheme])


@settings(deadline=None, max_examples=30)
@given(assignments())
def test_a_merged_projection_is_found_through_its_parts_only(
    layers: dict[str, QuantScheme | None],
) -> None:
    """vLLM looks for the joined name first, then for each part, and takes the first part's."""
    quantized, dense = split(layers)
    if len(set(quantized.values())) < 2:
        return
    targets = {t: g.scheme for g in scheme_groups(quantized, dense) for t in g.targets}
    patterns = [t.removeprefix("re:") for t in targets if t.startswith("re:")]
    for block in range(12):
        for joined, parts in MERGED.items():
            owner = "self_attn" if joined == "qkv_proj" else "mlp"
            name = f"model.layers.{block}.{owner}.{joined}"
            assert not any(re.match(pattern, name) for pattern in patterns)
            schemes = {layers[f"model.layers.{block}.{owner}.{part}"] for part in parts}
            assert len(schemes) == 1


def test_a_whole_kind_of_layer_is_one_short_target() -> None:
    layers = {
        f"model.layers.{i}.{name}": SCHEMES[2 if name == "mlp.down_proj" else 0]
        for i in range(32)
        for unit in UNITS
        for name in unit
    }
    groups = scheme_groups(layers, ["lm_head"])
    assert [len(group.targets) for group in groups] == [1, 1]
    assert groups[1].targets == (r"re:model\.layers\.\d+\.(mlp\.down_proj)$",)


def test_block_numbers_are_not_confused() -> None:
    layers = {f"model.layers.{i}.mlp.down_proj": SCHEMES[i in (1, 11)] for i in range(12)}
    groups = scheme_groups(layers)
    layout = QuantizationLayout(format="any", groups=tuple(groups), ignore=())
    assert {name: layout.scheme(name) for name in layers} == layers


@pytest.mark.parametrize("others", [[], ["lm_head"]])
def test_one_scheme_is_for_all_linears(others: list[str]) -> None:
    groups = scheme_groups({"model.layers.0.mlp.down_proj": SCHEMES[0]}, others)
    assert [group.targets for group in groups] == [("Linear",)]
