"""Recipes: YAML files that say how to quantize a model and what a gate demands of it.

::

    description: 4-bit weights by AWQ
    quantize:
      method: awq
      scheme: w4a16
      group_size: auto        # auto, channel, or a number
      kv_cache: fp8           # none, fp8 or int8: calibrated scales of the KV cache
    calibration:
      dataset: bundled        # bundled, self, a file, or a Hub data set
      num_samples: 128
      sequence_length: 2048
    gate:
      max_ppl_ratio: 1.10

Every section is optional; an unknown key is refused with the nearest known one. A recipe is named
(a file of ``recipes/``) or given as a path.

A recipe may start from another one, a shipped name or a path relative to its own file::

    extends: awq_w4a16
    quantize:
      group_size: 32          # the rest of the section stays
      options: null           # null takes a key of the parent away

Mappings are merged key by key at every depth, everything else is replaced, and null removes: the
rules of JSON Merge Patch (RFC 7396). ``description`` alone is not inherited.
"""

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from quantforge.errors import RecipeError
from quantforge.registry import did_you_mean
from quantforge.resources import resource_folder

EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
"""Numbers such as 1e-3, which YAML 1.1 takes for strings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSection:
    """How the linears of one pattern differ; what is None is as in the section around it.

    A `scheme` of its own brings its own group size and symmetry.
    """

    scheme: str | None = None
    group_size: int | str | None = None
    symmetric: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizeSection:
    """What to quantize and how. `options` go to the method, which checks them.

    `layers` gives linears schemes of their own, by name, last part or glob; of several patterns
    that match, the last counts. `target_bits` or `max_kl` choose schemes of `candidates` (default:
    `allocation.DEFAULT_CANDIDATES`) for the linears of the blocks by their sensitivity.
    """

    method: str = "awq"
    scheme: str = "w4a16"
    group_size: int | str = "auto"
    symmetric: bool | None = None
    """Overrides the scheme's own choice when set."""
    ignore: tuple[str, ...] = ("lm_head",)
    activation_observer: str | None = None
    """``absmax``, ``percentile``, ``percentile:99.9`` or ``mse``: what chooses the static scale of
    inputs; None takes the default. Only for schemes that have one."""
    kv_cache: str = "none"
    """``fp8`` or ``int8`` calibrates a scale for each layer's keys and values."""
    options: Mapping[str, Any] = field(default_factory=dict)
    layers: Mapping[str, LayerSection] = field(default_factory=dict)
    target_bits: float | None = None
    max_kl: float | None = None
    candidates: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationSection:
    """Which text a method sees. Lengths are in tokens."""

    dataset: str = "bundled"
    num_samples: int = 128
    sequence_length: int = 2048
    seed: int = 0
    split: str = "train"
    column: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GateSection:
    """Limits of the quality gate; a limit that is None is not checked."""

    dataset: str = "bundled"
    max_tokens: int | None = None
    window: int = 2048
    max_ppl_ratio: float | None = None
    max_ppl: float | None = None
    max_mean_kl: float | None = None
    max_p99_kl: float | None = None
    min_top1: float | None = None
    max_bits_per_weight: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A parsed recipe. `source` is the name or path that it came from, `extends` that of its
    parent, whose sections are merged in already."""

    source: str
    extends: str | None = None
    description: str = ""
    quantize: QuantizeSection = field(default_factory=QuantizeSection)
    calibration: CalibrationSection = field(default_factory=CalibrationSection)
    gate: GateSection | None = None


def recipe_names() -> tuple[str, ...]:
    """Names of the shipped recipes."""
    return tuple(sorted(p.stem for p in resource_folder("recipes").glob("*.yaml")))


def recipe_path(name: str) -> Path:
    """The file of a shipped recipe, or `name` itself as a path. Raises `RecipeError`."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        if not path.is_file():
            raise RecipeError(f"recipe file {name} does not exist")
        return path
    known = recipe_names()
    if name not in known:
        raise RecipeError(
            f"unknown recipe {name!r}{did_you_mean(name, known)}; known: {', '.join(known)}; "
            "or give the path of a .yaml file"
        )
    return resource_folder("recipes") / f"{name}.yaml"


def load_recipe(name: str) -> Recipe:
    """The recipe called `name`, or in the file `name`, merged with those that it extends."""
    return parse_recipe(load_document(name), source=name)


def load_document(name: str) -> dict[str, Any]:
    """The sections of a recipe as plain values, its parents merged in; ``extends`` tells of them.

    Raises `RecipeError` naming the file that is wrong, and the whole chain where it is a circle.
    """
    document, parent = _merged(name, recipe_path(name), ())
    if parent is not None:
        document["extends"] = parent
    order = [f.name for f in dataclasses.fields(Recipe)]
    return {key: document[key] for key in sorted(document, key=_place(order))}


def _place(order: list[str]) -> Callable[[object], int]:
    """A key for `sorted` that puts known keys in `order`, and unknown ones behind."""
    return lambda key: order.index(key) if isinstance(key, str) and key in order else len(order)


def _merged(name: str, path: Path, below: tuple[Path, ...]) -> tuple[dict[str, Any], str | None]:
    """(sections of the file `path`, merged; the parent's name), `below` the files extending it."""
    chain = (*below, path.resolve())
    if path.resolve() in below:
        names = " -> ".join(link.name for link in chain)
        raise RecipeError(f"recipe {name} extends itself: {names}")
    document = _read_document(path, name)
    parent = document.pop("extends", None)
    if parent is None:
        return document, None
    if not isinstance(parent, str):
        raise RecipeError(
            f"recipe {name}: extends is {parent!r}; expected a shipped recipe or a .yaml file"
        )
    inherited, _ = _merged(parent, _parent_path(parent, path, name), chain)
    parse_recipe(inherited, source=parent)  # an error of the parent names the parent
    inherited.pop("description", None)
    return merge_patch(inherited, document), parent


def _parent_path(parent: str, child: Path, name: str) -> Path:
    """The file that ``extends: <parent>`` of the file `child` means."""
    if Path(parent).suffix in (".yaml", ".yml"):
        path = child.parent / Path(parent).expanduser()
        if not path.is_file():
            raise RecipeError(f"recipe {name} extends {parent}, but {path} does not exist")
        return path
    if parent not in recipe_names():
        raise RecipeError(
            f"recipe {name} extends the unknown recipe {parent!r}"
            f"{did_you_mean(parent, recipe_names())}; known: {', '.join(recipe_names())}; "
            "or give a .yaml file, relative to this one"
        )
    return recipe_path(parent)


def _read_document(path: Path, name: str) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"recipe {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        line = str(error).replace("\n", " ")
        raise RecipeError(f"recipe {path} is not valid YAML: {line}") from error
    if document is None:
        return {}
    if not isinstance(document, Mapping):
        raise RecipeError(f"recipe {name}: expected a mapping of sections, found {document!r}")
    return dict(document)


def merge_patch(target: Any, patch: Any) -> Any:
    """`target` changed by `patch` as RFC 7396 says: mappings merge, null removes, the rest wins."""
    if not isinstance(patch, Mapping):
        return patch
    merged = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged


def parse_recipe(document: Any, source: str) -> Recipe:
    """A recipe from parsed YAML; `source` names it in errors."""
    if document is None:
        document = {}
    if not isinstance(document, Mapping):
        raise RecipeError(f"recipe {source}: expected a mapping of sections, found {document!r}")
    recipe: Recipe = read_section(Recipe, {**document, "source": source}, f"recipe {source}")
    return recipe


def read_section(cls: Any, values: Mapping[str, Any], where: str) -> Any:
    """An instance of the dataclass `cls`, each value checked against its field's type."""
    hints = typing.get_type_hints(cls)
    known = [f.name for f in dataclasses.fields(cls)]
    for key in values:
        if key not in known:
            allowed = ", ".join(k for k in known if k != "source")
            raise RecipeError(
                f"{where}: unknown key {key!r}{did_you_mean(str(key), known)}; known: {allowed}"
            )
    return cls(**{k: _convert(v, hints[k], f"{where}: {k}") for k, v in values.items()})


def _convert(value: Any, hint: Any, where: str) -> Any:
    """`value` as `hint` asks; raises `RecipeError` naming the key and the type wanted."""
    if isinstance(hint, types.UnionType):
        options = typing.get_args(hint)
        if value is None and types.NoneType in options:
            return None
        for option in options:
            if option is not types.NoneType:
                try:
                    return _convert(value, option, where)
                except RecipeError:
                    if dataclasses.is_dataclass(option):
                        raise
        raise RecipeError(f"{where} is {value!r}; expected {hint}")
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise RecipeError(f"{where} is {value!r}; expected a mapping")
        return read_section(hint, value, where)
    origin = typing.get_origin(hint) or hint
    if origin is tuple:
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise RecipeError(f"{where} is {value!r}; expected a list of strings")
        return tuple(value)
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise RecipeError(f"{where} is {value!r}; expected a mapping")
        inner = typing.get_args(hint)[1]
        if inner is Any:
            return dict(value)
        return {str(k): _convert(v, inner, f"{where}: {k}") for k, v in value.items()}
    if origin is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if origin is float and isinstance(value, str) and EXPONENT.fullmatch(value):
        return float(value)
    if not isinstance(value, origin) or (origin is int and isinstance(value, bool)):
        advice = ""
        if origin is str and isinstance(value, bool):
            advice = "; YAML reads yes, no, on and off as booleans, so quote the word"
        raise RecipeError(f"{where} is {value!r}; expected {origin.__name__}{advice}")
    return value
