"""Options that several commands share, so that they read the same everywhere."""

from pathlib import Path
from typing import Annotated

import typer

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A local model folder, a .gguf file, or a Hugging Face id."
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout.", rich_help_panel=None)
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no tables.")]
DeviceOption = Annotated[
    str,
    typer.Option("--device", help="auto, cpu, cuda or cuda:N; auto takes a GPU if there is one."),
]
DTypeOption = Annotated[
    str,
    typer.Option(
        "--dtype",
        help="auto, float32, bfloat16 or float16; auto: float32 on a CPU, the model's on a GPU.",
    ),
]
KVCacheOption = Annotated[
    str,
    typer.Option(
        "--kv-cache-dtype",
        help="auto, model, fp8_e4m3, fp8_e5m2 or int8; auto: what the checkpoint has scales for, "
        "else the model's dtype.",
    ),
]
NoCudaGraphsOption = Annotated[
    bool,
    typer.Option(
        "--no-cuda-graphs", help="Launch every kernel of a decode step anew, to look for errors."
    ),
]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace the output folder if it exists.")
]
BaselineOption = Annotated[
    str | None,
    typer.Option(
        "--baseline", metavar="MODEL", help="The unquantized model to compare with, as MODEL."
    ),
]
TextTokensOption = Annotated[
    int | None, typer.Option("--max-tokens", help="Use only the first tokens of the text.")
]
ReportOption = Annotated[
    Path | None, typer.Option("--report", help="Also write a report: a .html or .md file.")
]
CalibrationOption = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        metavar="DATA",
        help="bundled, bundled:prose, bundled:code, bundled:chat, self (sampled from the model), "
        "a .txt, .jsonl, .json or .parquet file, a Hub data set, or statistics of "
        "'quantforge calibrate' (.safetensors).",
    ),
]
NumSamplesOption = Annotated[int | None, typer.Option("--num-samples", help="Calibration samples.")]
SequenceLengthOption = Annotated[
    int | None, typer.Option("--sequence-length", help="Tokens of a calibration sample.")
]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Order of the calibration text.")]
ColumnOption = Annotated[
    str | None, typer.Option("--column", help="Column that holds the text, or the messages.")
]
