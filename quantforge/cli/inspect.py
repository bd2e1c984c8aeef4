"""``quantforge inspect``: schemes, sizes and provenance of a model folder."""

from typing import TYPE_CHECKING, Any

import typer

from quantforge.cli.options import JsonOption, ModelArgument, QuietOption

if TYPE_CHECKING:
    from pathlib import Path

    from quantforge.console import Console


def register(app: typer.Typer) -> None:
    @app.command(
        epilog="Examples:  quantforge inspect models/smollm2-awq  |  "
        "quantforge inspect models/smollm2-awq --json"
    )
    def inspect(
        model: ModelArgument, json_output: JsonOption = False, quiet: QuietOption = False
    ) -> None:
        """Show how a model is quantized, its size, bits per weight and where it comes from."""
        from quantforge.checkpoint.inspection import describe_checkpoint
        from quantforge.console import Console
        from quantforge.models.source import resolve_model

        console = Console(json_output=json_output, quiet=quiet)
        with console.progress() as progress:
            folder = resolve_model(model, progress=progress)
        document = describe_checkpoint(folder) | {"serving_notes": _serving_notes(folder)}
        _show(console, document)
        console.result(document, _summary(document))


def _show(console: "Console", document: dict[str, Any]) -> None:
    rows = [
        (s["scheme"], s["num_layers"], f"{s['bytes'] / 1e6:.1f}", f"{s['bits_per_weight']:.3f}")
        for s in document["schemes"]
    ]
    console.table("Linears", ("scheme", "layers", "MB", "bits per weight"), rows)
    if document["kv_cache"] is not None:
        console.table("KV-cache scales", ("of", "smallest", "largest"), _kv_rows(document))
    sizes = [(kind, f"{size / 1e6:.1f}") for kind, size in document["bytes"].items()]
    console.table("Size", ("part", "MB"), sizes)
    for note in document["serving_notes"]:
        console.say(note)
    if document["provenance"] is not None:
        console.table("Provenance", ("what", "value"), _provenance(document["provenance"]))


def _kv_rows(document: dict[str, Any]) -> list[tuple[str, str, str]]:
    found = document["kv_cache"]
    pairs = ((kind, found[kind]) for kind in ("k_scale", "v_scale") if found[kind] is not None)
    return [(kind, f"{r['min']:.3g}", f"{r['max']:.3g}") for kind, r in pairs]


def _serving_notes(folder: "Path") -> list[str]:
    """What is to be known of how the schemes of a checkpoint are served."""
    from quantforge.checkpoint.reader import CheckpointReader
    from quantforge.models.linear import serving_notes

    layout = CheckpointReader(folder).layout
    return [] if layout is None else serving_notes(group.scheme for group in layout.groups)


def _provenance(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    calibration = manifest["calibration"]
    return [
        ("source", str(manifest["source"].get("name"))),
        ("method", f"{manifest['method']}, {manifest['scheme']}, seed {manifest['seed']}"),
        ("calibration", "none" if calibration is None else _joined(calibration)),
        ("versions", _joined(manifest["versions"])),
        ("created", manifest["created"]),
        ("evaluations", str(len(manifest["evaluations"]))),
    ]


def _joined(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def _summary(document: dict[str, Any]) -> str:
    bits = document["bits_per_weight"] or {}
    linears, model = bits.get("quantized_linears"), bits.get("model")
    parts = [
        f"{document['architecture']}",
        f"{document['num_weights'] / 1e6:.1f} M weights",
        f"{document['bytes']['total'] / 1e6:.1f} MB",
    ]
    if linears is None:
        parts.append("not quantized")
    else:
        parts.append(f"{linears:.3f} bits per weight in the quantized linears")
    if model is not None:
        parts.append(f"{model:.3f} in the whole model")
    if document["kv_cache"] is not None:
        parts.append(f"scales for a {document['kv_cache']['scheme']} KV cache")
    return ", ".join(parts)
