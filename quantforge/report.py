"""What a run did to every layer, as rows for a terminal and as an HTML page.

Everything comes from the manifest (``quantforge.json``), so that the page of a finished folder can
be made again at any time.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantforge.checkpoint.manifest import MANIFEST_FILE, Manifest, read_manifest
from quantforge.errors import CheckpointError, UsageError
from quantforge.page import Rows, bar_plot, heat_map, number, page, table

Layer = Mapping[str, Any]
"""One entry of a manifest's ``layers``: a `LayerReport` as JSON."""

LAYER_COLUMNS = (
    "layer",
    "scheme",
    "bits",
    "method",
    "why",
    "weight error",
    "output error",
    "damping",
    "outliers",
    "seconds",
)
TOTAL_COLUMNS = ("method", "scheme", "layers", "mean output error", "largest", "seconds")
QUIET_NOTES = ("fallback", "damping")
"""Notes that have a column of their own, or that the column ``why`` begins with."""


def check_report_path(path: Path) -> None:
    """Raises `UsageError` if no page can be written to `path`: called before any work."""
    if path.suffix != ".html":
        raise UsageError(f"report {path} has suffix {path.suffix!r}; use .html")
    if not path.parent.is_dir():
        raise UsageError(f"report {path}: folder {path.parent} does not exist")


def write_page(folder: Path, path: Path) -> Path:
    """`path`, holding the page of the quantized model in `folder`.

    Raises `CheckpointError` where there is no manifest or it lists no layers.
    """
    check_report_path(path)
    manifest = read_manifest(folder)
    if manifest is None:
        raise CheckpointError(
            f"{folder} has no {MANIFEST_FILE}; only folders that quantforge wrote have a report"
        )
    try:
        path.write_text(to_page(manifest), encoding="utf-8")
    except KeyError as error:
        raise CheckpointError(
            f"{folder / MANIFEST_FILE}: its layers have no {error}, so there is no report to make"
        ) from error
    except OSError as error:
        raise CheckpointError(f"cannot write report {path}: {error.strerror}") from error
    return path


def to_page(manifest: Manifest) -> str:
    """The HTML page: what was done, plots, fallbacks, and every layer."""
    layers = manifest.layers
    title = f"{manifest.source.get('name', 'a model')}: {manifest.method} to {manifest.scheme}"
    sections = [
        table("The run", ("", ""), run_rows(manifest)),
        table("By method and scheme", TOTAL_COLUMNS, total_rows(layers)),
    ]
    if fallen := fallback_rows(layers):
        sections.append(table("Fallbacks", ("layer", "why"), fallen))
    sections.append(_plots(layers))
    sections.append(table("Layers", LAYER_COLUMNS, [_layer_row(layer) for layer in layers]))
    return page(title, "".join(sections), wide=True)


def run_rows(manifest: Manifest) -> Rows:
    """(what, value) of the run as a whole: recipe, text, time, memory, what stayed dense."""
    run = manifest.run or {}
    rows: Rows = [("recipe", _recipe_name(manifest.recipe)), ("seed", str(manifest.seed))]
    rows.append(("calibration", _pairs(manifest.calibration) or "none"))
    source = manifest.source.get("dequantized_from")
    if source:
        rows.append(("source", f"dequantized from {_pairs(source)}"))
    if "device" in run:
        rows.append(("device", f"{run['device']}, {run['dtype']}"))
    if "seconds" in run:
        rows.append(("seconds", _pairs(run["seconds"])))
    if "peak_host_bytes" in run:
        used = memory(run["peak_host_bytes"], run["peak_device_bytes"])
        rows.append(("peak memory before the last check", used))
    if "ignored" in run:
        rows.append(("left as they are", ", ".join(run["ignored"]) or "none"))
    rows.append(("versions", _pairs(manifest.versions)))
    return rows


def total_rows(layers: Sequence[Layer]) -> Rows:
    """(method, scheme, layers, mean and largest output error, seconds) of each method and scheme.

    The errors are those of the weights where no layer has one of its output.
    """
    members: dict[tuple[str, str], list[Layer]] = {}
    for layer in layers:
        members.setdefault((layer["method"], layer["scheme"]), []).append(layer)
    return [
        (
            method,
            scheme,
            str(len(found)),
            f"{sum(error_of(layer) for layer in found) / len(found):.2e}",
            f"{max(error_of(layer) for layer in found):.2e}",
            f"{sum(layer.get('seconds') or 0.0 for layer in found):.1f}",
        )
        for (method, scheme), found in members.items()
    ]


def fallback_rows(layers: Sequence[Layer]) -> Rows:
    """(layer, why) of the layers that did not get the method that was asked for."""
    return [
        (layer["name"], str(layer["notes"]["fallback"]))
        for layer in layers
        if "fallback" in layer.get("notes", {})
    ]


def worst_layers(layers: Sequence[Layer], count: int) -> list[Layer]:
    """The `count` layers of the largest errors, largest first."""
    return sorted(layers, key=lambda layer: -error_of(layer))[:count]


def error_of(layer: Layer) -> float:
    """The relative error of a layer's output, or of its weight where there was no text."""
    error = layer.get("output_error")
    return float(layer["weight_error"] if error is None else error)


def why(layer: Layer) -> str:
    """What the method noted of its choices, in one line; a fallback's reason first."""
    notes = layer.get("notes") or {}
    parts = [str(notes["fallback"])] if "fallback" in notes else []
    parts += [
        f"{k.replace('_', ' ')} {_value(v)}" for k, v in notes.items() if k not in QUIET_NOTES
    ]
    return "; ".join(parts)


def memory(host_bytes: int, device_bytes: int) -> str:
    """``1.20 GB host, 0.86 GB device``; without a device where none was used."""
    device = f", {device_bytes / 1e9:.2f} GB device" if device_bytes else ""
    return f"{host_bytes / 1e9:.2f} GB host{device}"


def _layer_row(layer: Layer) -> tuple[str, ...]:
    notes = layer.get("notes") or {}
    outliers = layer.get("outlier_ratio")
    where = f" (channel {layer['outlier_channel']})" if outliers is not None else ""
    return (
        layer["name"],
        layer["scheme"],
        _figure(layer.get("bits_per_weight")),
        layer["method"],
        why(layer),
        f"{layer['weight_error']:.3e}",
        "-" if layer.get("output_error") is None else f"{layer['output_error']:.3e}",
        _figure(notes.get("damping")),
        _figure(outliers) + where,
        _figure(layer.get("seconds")),
    )


def _plots(layers: Sequence[Layer]) -> str:
    """Heat maps of errors, outliers and bits over the blocks, and the errors of whole blocks."""
    parts = []
    errors = _grid(layers, error_of)
    if errors:
        plot = heat_map(errors, ("first block", "last"))
        parts.append(f"<h2>Error by layer</h2>\n{plot}")
        blocks: dict[str, list[float]] = {}
        for (_, block), value in errors.items():
            blocks.setdefault(block, []).append(value)
        means = [sum(values) / len(values) for values in blocks.values()]
        labels = [f"block {block}" for block in blocks]
        plot = bar_plot(means, labels, ("first block", "last"))
        parts.append(f"<h2>Mean error of each block</h2>\n{plot}")
    outliers = _inputs(layers)
    if outliers:
        plot = heat_map(
            {key: float(layer["outlier_ratio"]) for key, layer in outliers.items()},
            ("first block", "last"),
            labels={
                key: f"input of {layer['name']}, channel {layer['outlier_channel']}"
                for key, layer in outliers.items()
            },
        )
        parts.append(
            "<h2>Outliers: strongest channel of each input over the median channel</h2>\n" + plot
        )
    bits = _grid([layer for layer in layers if layer.get("bits_per_weight")], _bits)
    if bits:
        plot = heat_map(bits, ("first block", "last"), logarithmic=False)
        parts.append(f"<h2>Bits a weight by layer</h2>\n{plot}")
    return "\n".join(parts) + "\n"


def _bits(layer: Layer) -> float:
    return float(layer["bits_per_weight"])


def _grid(layers: Sequence[Layer], value: Any) -> dict[tuple[str, str], float]:
    """`value` of every linear of a block by (its last name, the block's number)."""
    found = {}
    for layer in layers:
        block = block_of(layer["name"])
        if block is not None:
            found[layer["name"].rpartition(".")[2], block] = float(value(layer))
    return found


def _inputs(layers: Sequence[Layer]) -> dict[tuple[str, str], Layer]:
    """The first layer of every input group by (group, block); all of them read the same input."""
    found: dict[tuple[str, str], Layer] = {}
    for layer in layers:
        block = block_of(layer["name"])
        if block is not None and layer.get("outlier_ratio") is not None:
            found.setdefault((layer["input_group"], block), layer)
    return found


def block_of(name: str) -> str | None:
    """``7`` for ``model.layers.7.mlp.up_proj``; None for a linear outside the blocks."""
    return next((part for part in name.split(".") if part.isdigit()), None)


def _recipe_name(recipe: Mapping[str, Any]) -> str:
    if not recipe:
        return "unknown"
    parent = f", which extends {recipe['extends']}" if recipe.get("extends") else ""
    return f"{recipe.get('source', 'unknown')}{parent}"


def _pairs(values: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{key} {_value(value)}" for key, value in (values or {}).items())


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"({_pairs(value)})"
    if isinstance(value, list | tuple):
        return ", ".join(_value(item) for item in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _figure(value: float | None) -> str:
    return "-" if value is None else number(float(value))
