"""What the formats of compressed-tensors share: config keys and targets."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from quantforge.checkpoint._stored import check_pattern
from quantforge.checkpoint.base import QuantizationLayout, SchemeGroup
from quantforge.errors import CheckpointError, RecipeError, UnsupportedError
from quantforge.schemes import FP4_GROUPS, QuantScheme, ScaleFormat, TensorQuant

LAYOUT_VERSION = "0.20.1"
"""The release of compressed-tensors whose layouts these are."""


FP4_SCALES = {"e4m3": ("tensor_group", "torch.float8_e4m3fn"), "e8m0": ("group", "torch.uint8")}
"""Strategy and ``scale_dtype`` of E2M1 weights, by the format of their scales."""


def is_config_of(format_name: str, quantization_config: Mapping[str, Any]) -> bool:
    """Whether a ``quantization_config`` has all its groups in the format `format_name`."""
    if quantization_config.get("quant_method") != "compressed-tensors":
        return False
    groups = quantization_config.get("config_groups")
    kinds = {quantization_config.get("format")}
    if isinstance(groups, Mapping):
        own = {g.get("format") for g in groups.values() if isinstance(g, Mapping)} - {None}
        kinds = own or kinds
    return kinds == {format_name}


def config_section(
    format_name: str, groups: Sequence[SchemeGroup], ignore: Sequence[str]
) -> dict[str, Any]:
    """The ``quantization_config`` of `groups`, all in the format `format_name`."""
    return {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "quantization_status": "compressed",
        "version": LAYOUT_VERSION,
        "ignore": list(ignore),
        "config_groups": {
            f"group_{i}": _group_section(format_name, group) for i, group in enumerate(groups)
        },
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "moe_sparsity_config": None,
        "sparsity_config": {},
        "transform_config": {},
    }


def _group_section(format_name: str, group: SchemeGroup) -> dict[str, Any]:
    activation = group.scheme.activation
    return {
        "format": format_name,
        "targets": list(group.targets),
        "input_activations": None if activation is None else _arguments(activation),
        "output_activations": None,
        "weights": _arguments(group.scheme.weight),
    }


def _arguments(quant: TensorQuant) -> dict[str, Any]:
    """compressed-tensors' QuantizationArgs; ``block_structure``, ``scale_dtype`` only if needed."""
    more: dict[str, Any] = {}
    strategy: str = quant.granularity
    if quant.block_shape is not None:
        more["block_structure"] = list(quant.block_shape)
    if quant.scale_format is not None:
        strategy, more["scale_dtype"] = FP4_SCALES[quant.scale_format]
    return {
        "num_bits": quant.num_bits,
        "type": quant.dtype,
        "symmetric": quant.symmetric,
        "strategy": strategy,
        "group_size": quant.group_size,
        **more,
        "dynamic": quant.dynamic,
    }


def with_kv_cache(
    quantization_config: Mapping[str, Any], kv_cache: TensorQuant | None
) -> dict[str, Any]:
    """`quantization_config`, saying that the KV cache has calibrated scales for `kv_cache`.

    Raises `UnsupportedError` for a format that has no word for it.
    """
    if kv_cache is None:
        return dict(quantization_config)
    if not holds_kv_cache(quantization_config):
        raise UnsupportedError(
            f"format {quantization_config.get('quant_method')} cannot hold scales of a KV cache; "
            "compressed-tensors formats can"
        )
    return {**quantization_config, "kv_cache_scheme": _arguments(kv_cache)}


def holds_kv_cache(quantization_config: Mapping[str, Any]) -> bool:
    """Whether a ``quantization_config`` is of a kind that may have a ``kv_cache_scheme``."""
    return quantization_config.get("quant_method") == "compressed-tensors"


def _parse_kv_cache(values: Any) -> TensorQuant | None:
    """``kv_cache_scheme``: one static scale for a layer's keys and one for its values, or None."""
    if values is None:
        return None
    where = "quantization_config: kv_cache_scheme"
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{where} is {values!r}; expected a mapping")
    strategy = values.get("strategy")
    if strategy not in (None, "tensor") or values.get("dynamic") or values.get("num_bits") != 8:
        raise UnsupportedError(
            f"{where} has num_bits {values.get('num_bits')!r}, strategy {strategy!r} and dynamic "
            f"{values.get('dynamic')!r}; only 8 bits with one static scale a layer are supported"
        )
    quant = _parse_arguments(where, {**values, "strategy": "tensor"})
    if not quant.symmetric:
        raise UnsupportedError(f"{where} is asymmetric; only symmetric scales are supported")
    return quant


def parse_layout(format_name: str, quantization_config: Mapping[str, Any]) -> QuantizationLayout:
    """The inverse of `config_section`; raises `CheckpointError` or `UnsupportedError`."""
    groups = quantization_config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError("quantization_config: config_groups is missing or empty")
    return QuantizationLayout(
        format=format_name,
        groups=tuple(_parse_group(name, group) for name, group in groups.items()),
        ignore=_patterns("ignore", quantization_config.get("ignore") or ()),
        kv_cache=_parse_kv_cache(quantization_config.get("kv_cache_scheme")),
    )


def _parse_group(name: str, group: Any) -> SchemeGroup:
    """One entry of ``config_groups``; `name` is for errors."""
    where = f"quantization_config: {name}"
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"{where}: weights is {weights!r}; expected a mapping")
    if group.get("output_activations") is not None:
        raise UnsupportedError(f"{where}: output_activations are not supported")
    inputs = group.get("input_activations")
    if inputs is not None and not isinstance(inputs, Mapping):
        raise CheckpointError(f"{where}: input_activations is {inputs!r}; expected a mapping")
    if weights.get("actorder") in ("group", "dynamic", True):
        raise UnsupportedError(f"{where}: actorder {weights['actorder']!r} is not supported")
    activation = None
    if inputs is not None:
        activation = _parse_arguments(f"{where}: input_activations", inputs)
    weight = _parse_arguments(f"{where}: weights", weights)
    scheme = QuantScheme(weight=weight, activation=activation)
    return SchemeGroup(targets=_patterns(f"{name}.targets", group.get("targets")), scheme=scheme)


def _parse_arguments(where: str, values: Mapping[str, Any]) -> TensorQuant:
    """compressed-tensors' QuantizationArgs as a `TensorQuant`, with its defaults."""
    size = values.get("group_size")
    size = None if size == -1 else size
    strategy: Any = values.get("strategy")
    if strategy is None:
        inferred = "tensor" if values.get("group_size") is None else "channel"
        strategy = inferred if size is None else "group"
    scale_format: ScaleFormat | None = None
    if (values.get("type"), values.get("num_bits")) == ("float", 4):
        if strategy == "tensor_group":
            strategy, scale_format = "group", "e4m3"
        elif strategy == "group" and size == FP4_GROUPS["e8m0"]:
            scale_format = "e8m0"
    try:
        return TensorQuant(
            num_bits=values.get("num_bits", 8),
            dtype=values.get("type", "int"),
            symmetric=values.get("symmetric", True),
            granularity=strategy,
            group_size=size,
            block_shape=_block_shape(values.get("block_structure")),
            dynamic=bool(values.get("dynamic", False)),
            scale_format=scale_format,
        )
    except (RecipeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: {error}") from error


def _block_shape(value: Any) -> tuple[int, int] | None:
    """``[128, 128]``, or ``"128x128"`` as older files have it; raises `ValueError`."""
    if value is None:
        return None
    sizes = value.split("x") if isinstance(value, str) else value
    if not isinstance(sizes, list | tuple) or len(sizes) != 2 or min(map(int, sizes)) < 1:
        raise ValueError(f"block_structure is {value!r}; expected two sizes such as [128, 128]")
    return int(sizes[0]), int(sizes[1])


def refuse_unfit(
    format_name: str, fits: Callable[[QuantScheme], bool], groups: Iterable[SchemeGroup]
) -> None:
    """Raises `UnsupportedError` for the first group whose scheme the format does not hold."""
    for group in groups:
        if not fits(group.scheme):
            raise UnsupportedError(
                f"format {format_name} cannot hold scheme {group.scheme} of targets "
                f"{', '.join(group.targets)}"
            )


def _patterns(key: str, values: Any) -> tuple[str, ...]:
    """Targets or ignored layers; each ``re:`` pattern must compile."""
    if not isinstance(values, list | tuple) or not all(isinstance(v, str) for v in values):
        raise CheckpointError(
            f"quantization_config: {key} is {values!r}; expected a list of strings"
        )
    for value in values:
        if value.startswith("re:"):
            check_pattern(f"quantization_config: {key}", value.removeprefix("re:"))
    return tuple(values)
