"""What will be quantized how, decided and checked before any work starts."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from quantforge.calibration.ranges import DEFAULT_OBSERVER, Observer, parse_observer
from quantforge.checkpoint.base import Format, format_for, format_for_all
from quantforge.checkpoint.kv_scales import KV_SCALE_BYTES
from quantforge.checkpoint.reader import CheckpointReader
from quantforge.errors import RecipeError, UnsupportedError
from quantforge.methods.base import Method, load_method
from quantforge.models.arch.base import Architecture
from quantforge.models.config import ModelConfig
from quantforge.models.expected import check_checkpoint, extra_tensors
from quantforge.models.loader import architecture_of, load_config
from quantforge.models.partition import Partition
from quantforge.recipe import LayerSection, QuantizeSection
from quantforge.schemes import QuantScheme, TensorQuant, kv_cache_quant, preset, with_group_size

AUTO_GROUP_SIZES = (128, 64, 32)


@dataclass(frozen=True, kw_only=True)
class QuantizePlan:
    """Method, format, and the scheme of every linear that will be quantized, by full name.

    `scheme` is that of linears for which nothing else was said, `format` that of the checkpoint;
    `allocation` says how schemes were chosen, where they were. `planned_bytes` is what the weight
    files will hold, without headers; `observer` chooses the static scales of inputs, None where no
    scheme has any.
    """

    method: Method
    options: Any
    architecture: Architecture
    config: ModelConfig
    scheme: QuantScheme
    format: Format
    layers: Mapping[str, QuantScheme]
    ignore: tuple[str, ...]
    planned_bytes: int
    extra: tuple[str, ...] = ()
    """Tensors of the blocks that the model does not use, such as old buffers: copied as they are"""
    observer: Observer | None = None
    kv_cache: TensorQuant | None = None
    """What the KV cache's scales are calibrated for, None where there are none."""
    allocation: Mapping[str, Any] | None = None

    @property
    def needs_text(self) -> bool:
        """Whether calibration data are needed: by the method, for static scales of inputs, or for
        scales of the KV cache."""
        return (
            self.method.needs_statistics or self.observer is not None or self.kv_cache is not None
        )

    @property
    def scheme_name(self) -> str:
        """The schemes of all layers, the one of most layers first: ``int4-g64-asym + ...``."""
        counts = Counter(self.layers.values()).most_common()
        return " + ".join(str(scheme) for scheme, _ in counts)

    def format_of(self, layer: str) -> Format:
        """The format in which `layer` is stored: that of the checkpoint, or a part of it."""
        return format_for(self.layers[layer])

    def block_linears(self, layer: int) -> dict[str, QuantScheme]:
        """The targets of one block, by name within the block."""
        prefix = self.architecture.block_prefix.format(layer=layer)
        return {n.removeprefix(prefix): s for n, s in self.layers.items() if n.startswith(prefix)}

    def describe_scheme(self) -> str:
        """``int4-g64-asym``, or ``int4-g64-asym, KV cache fp8-tensor``."""
        kv_cache = "" if self.kv_cache is None else f", KV cache {self.kv_cache}"
        return f"{self.scheme_name}{kv_cache}"

    @property
    def quantizes_lm_head(self) -> bool:
        return self.architecture.lm_head in self.layers


def plan_quantization(
    reader: CheckpointReader,
    section: QuantizeSection,
    assigned: Mapping[str, QuantScheme] | None = None,
    allocation: Mapping[str, Any] | None = None,
) -> QuantizePlan:
    """The plan of `section` for the model behind `reader`.

    `assigned` are schemes that an allocation chose, by layer; `allocation` says how.

    Raises `UnsupportedError` for a model that is quantized already or that no format can hold,
    `CheckpointError` for tensors that are missing or of a wrong shape, and `RecipeError` for
    options, names to ignore or group sizes that do not fit.
    """
    if reader.layout is not None:
        raise UnsupportedError(
            f"{reader.folder} is quantized already ({reader.layout.format}); "
            "quantize the original model instead, or give --dequantize"
        )
    method = load_method(section.method)
    options = method.parse_options(section.options)
    architecture = architecture_of(reader.config)
    config = load_config(reader.config)
    check_checkpoint(reader, config, architecture, Partition())
    extra = extra_tensors(reader, config, architecture)
    shapes = linear_shapes(reader, architecture, config)
    targets, ignored = split_ignored(shapes, section.ignore)
    if not targets:
        raise RecipeError(f"ignore {list(section.ignore)} leaves nothing to quantize")
    scheme, layers = resolve_layers(section, shapes, targets)
    layers |= assigned or {}
    for used in dict.fromkeys(layers.values()):
        weight = used.weight
        if not method.rounds_to(weight):
            raise RecipeError(
                f"method {method.name} does not round to {used.weight.code_type} codes, which "
                f"scheme {used} has; use method rtn"
            )
        refuse_misfits({name: shapes[name] for name in targets if layers[name] == used}, used)
    refuse_split_groups(layers, architecture, config)
    observer = resolve_observer(section, layers.values(), layers.get(architecture.lm_head))
    layout = format_for_all(layers.values())
    dense_bytes = sum(reader.spec(n).num_bytes for n in reader.names())
    saved = 0
    for name in targets:
        specs = layout.tensors(shapes[name], layers[name], config.dtype).values()
        replaced = f"{name}.weight"
        saved += reader.spec(replaced).num_bytes if replaced in reader else 0
        saved -= sum(spec.num_bytes for spec in specs)
    kv_cache = kv_cache_quant(section.kv_cache)
    if kv_cache is not None:
        dense_bytes += config.num_layers * KV_SCALE_BYTES
    return QuantizePlan(
        method=method,
        options=options,
        architecture=architecture,
        config=config,
        scheme=scheme,
        format=layout,
        layers=layers,
        ignore=tuple(ignored),
        planned_bytes=dense_bytes - saved,
        extra=extra,
        observer=observer,
        kv_cache=kv_cache,
        allocation=allocation,
    )


def linear_shapes(
    reader: CheckpointReader, architecture: Architecture, config: ModelConfig
) -> dict[str, tuple[int, int]]:
    """[out_features, in_features] of every linear of the blocks, and of lm_head, by full name."""
    shapes = {}
    for layer in range(config.num_layers):
        prefix = architecture.block_prefix.format(layer=layer)
        for group in architecture.input_groups:
            for member in group.members:
                rows, columns = reader.spec(f"{prefix}{member}.weight").shape
                shapes[f"{prefix}{member}"] = (rows, columns)
    shapes[architecture.lm_head] = (config.vocab_size, config.hidden_size)
    return shapes


def split_ignored(
    names: Mapping[str, object], ignore: tuple[str, ...]
) -> tuple[list[str], list[str]]:
    """(targets, ignored): a pattern equals a name, or its last part, or globs it."""
    for pattern in ignore:
        refuse_unknown(names, pattern, "ignore")
    ignored = [n for n in names if any(is_named(n, p) for p in ignore)]
    return [n for n in names if n not in ignored], ignored


def is_named(name: str, pattern: str) -> bool:
    """Whether `pattern` is `name`, its last part, or a glob that it fits."""
    return pattern in (name, name.rsplit(".", 1)[-1]) or fnmatchcase(name, pattern)


def refuse_unknown(names: Iterable[str], pattern: str, where: str) -> None:
    """Raises `RecipeError` for a pattern that matches none of `names`."""
    if not any(is_named(name, pattern) for name in names):
        raise RecipeError(
            f"{where}: {pattern!r} matches no linear of the model; names look like "
            f"{next(iter(names))!r} (glob patterns and last parts such as 'down_proj' work too)"
        )


def resolve_layers(
    section: QuantizeSection, shapes: Mapping[str, tuple[int, int]], targets: list[str]
) -> tuple[QuantScheme, dict[str, QuantScheme]]:
    """(scheme of the section, scheme of each target): the last pattern of `layers` counts."""
    pattern_of: dict[str, str | None] = dict.fromkeys(targets)
    for pattern in section.layers:
        refuse_unknown(shapes, pattern, "layers")
        if not any(is_named(name, pattern) for name in targets):
            raise RecipeError(f"layers: {pattern!r} matches only linears that `ignore` leaves out")
        pattern_of |= {name: pattern for name in targets if is_named(name, pattern)}
    members: dict[str | None, list[str]] = {}
    for name, found in pattern_of.items():
        members.setdefault(found, []).append(name)
    layers: dict[str, QuantScheme] = {}
    for chosen, names in members.items():
        own = section if chosen is None else _overridden(section, section.layers[chosen])
        try:
            scheme = resolve_scheme(own, {name: shapes[name] for name in names})
        except RecipeError as error:
            where = "" if chosen is None else f"layers: {chosen!r}: "
            raise RecipeError(f"{where}{error}") from error
        layers |= dict.fromkeys(names, scheme)
    rest = members.get(None) or targets
    return layers[rest[0]], {name: layers[name] for name in targets}


def _overridden(section: QuantizeSection, own: LayerSection) -> QuantizeSection:
    """`section` as it is for the linears of one pattern."""
    if own.scheme is not None:
        return dataclasses.replace(
            section,
            scheme=own.scheme,
            group_size="auto" if own.group_size is None else own.group_size,
            symmetric=own.symmetric,
        )
    return dataclasses.replace(
        section,
        group_size=section.group_size if own.group_size is None else own.group_size,
        symmetric=section.symmetric if own.symmetric is None else own.symmetric,
    )


def merge_units(
    layers: Iterable[str], architecture: Architecture, config: ModelConfig
) -> list[tuple[str, ...]]:
    """The linears of `layers` that runtimes join into one (q/k/v, gate/up) and so share a scheme,
    block by block; a linear that nothing is joined with is a unit of its own. No lm_head."""
    known = set(layers)
    units = []
    for layer in range(config.num_layers):
        prefix = architecture.block_prefix.format(layer=layer)
        for group in architecture.input_groups:
            members = tuple(n for m in group.members if (n := prefix + m) in known)
            units += [members] if members else []
    return units


def refuse_split_groups(
    layers: Mapping[str, QuantScheme], architecture: Architecture, config: ModelConfig
) -> None:
    """Raises `RecipeError` where linears that runtimes join have different schemes."""
    for unit in merge_units(layers, architecture, config):
        if other := [name for name in unit if layers[name] != layers[unit[0]]]:
            raise RecipeError(
                f"layers: {unit[0]} is {layers[unit[0]]}, but {other[0]} is {layers[other[0]]}; "
                f"runtimes join {', '.join(n.rsplit('.', 1)[-1] for n in unit)} into one product, "
                "so give them one scheme"
            )


def resolve_scheme(section: QuantizeSection, shapes: Mapping[str, tuple[int, int]]) -> QuantScheme:
    """The scheme of `section`, its group size chosen where that is ``auto``."""
    scheme = preset(section.scheme)
    if section.symmetric is not None:
        weight = dataclasses.replace(scheme.weight, symmetric=section.symmetric)
        scheme = dataclasses.replace(scheme, weight=weight)
    size = section.group_size
    if size != "auto" and scheme.weight.dtype != "int":
        raise RecipeError(
            f"group_size {size!r}: scheme {section.scheme} has its own granularity, "
            f"{scheme.weight}; leave group_size at auto"
        )
    if size == "auto":
        if scheme.weight.granularity != "group" or scheme.weight.dtype != "int":
            return scheme
        for candidate in AUTO_GROUP_SIZES:
            if all(columns % candidate == 0 for _, columns in shapes.values()):
                return with_group_size(scheme, candidate)
        raise RecipeError(
            f"no group size of {AUTO_GROUP_SIZES} divides every in_features of this model; "
            "use --group-size channel, or ignore the layers that do not fit"
        )
    if size == "channel":
        return with_group_size(scheme, None)
    try:
        return with_group_size(scheme, int(size))
    except ValueError as error:
        raise RecipeError(
            f"group_size {size!r} is not auto, channel or a number such as 64"
        ) from error


def resolve_observer(
    section: QuantizeSection, schemes: Iterable[QuantScheme], lm_head: QuantScheme | None
) -> Observer | None:
    """What chooses the static scales of inputs; None where no scheme has them.

    Raises `RecipeError` for an observer that has nothing to do, and for a head whose inputs no
    block sees.
    """
    if not any(scheme.has_static_inputs for scheme in schemes):
        if section.activation_observer is not None:
            raise RecipeError(
                f"activation_observer {section.activation_observer!r}: scheme {section.scheme} has "
                "no static scale of inputs; use fp8_static or w8a8_int8_static, or leave it out"
            )
        return None
    if lm_head is not None and lm_head.has_static_inputs:
        raise RecipeError(
            f"scheme {lm_head} cannot quantize lm_head, whose inputs are not calibrated; "
            "leave lm_head in ignore, or use fp8_dynamic or w8a8_int8"
        )
    return parse_observer(section.activation_observer or DEFAULT_OBSERVER)


def refuse_misfits(shapes: Mapping[str, tuple[int, int]], scheme: QuantScheme) -> None:
    """Raises `RecipeError` that names the first layer which cannot have `scheme`, and how many."""
    reasons = {n: r for n, s in shapes.items() if (r := scheme.refuse_shape(s)) is not None}
    if reasons:
        name, reason = next(iter(reasons.items()))
        others = f" (and {len(reasons) - 1} other layers)" if len(reasons) > 1 else ""
        raise RecipeError(reason.replace(";", f" of {name}{others};", 1))
