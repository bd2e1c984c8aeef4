"""``quantforge import``: turns a GGUF file into a Hugging Face folder."""

from pathlib import Path
from typing import Annotated

import typer

from quantforge.cli.options import JsonOption, OverwriteOption, QuietOption


def register(app: typer.Typer) -> None:
    @app.command(
        name="import",
        epilog="Examples:  quantforge import SmolLM2-135M.Q8_0.gguf --output models/smollm2",
    )
    def import_(
        source: Annotated[Path, typer.Argument(metavar="GGUF", help="The .gguf file to import.")],
        output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.")],
        dtype: Annotated[
            str,
            typer.Option(
                "--dtype",
                help="auto, float32, bfloat16 or float16; auto: as the file's matrices, and "
                "float32 for quantized ones.",
            ),
        ] = "auto",
        overwrite: OverwriteOption = False,
        json_output: JsonOption = False,
        quiet: QuietOption = False,
    ) -> None:
        """Turn a GGUF file into a Hugging Face folder: weights, config, tokenizer, chat template.

        Llama (Mistral too), Qwen2 and Qwen3 with byte-level BPE vocabularies can be imported, of
        every quantization that the gguf package knows. Weights are dequantized.
        """
        import json

        from quantforge.console import Console
        from quantforge.models.gguf_import import import_gguf

        console = Console(json_output=json_output, quiet=quiet)
        with console.progress() as progress:
            folder = import_gguf(
                source, output, dtype=dtype, overwrite=overwrite, progress=progress
            )
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        document = {
            "output": str(folder),
            "source": str(source),
            "architecture": config["architectures"][0],
            "dtype": config["torch_dtype"],
            "num_weight_bytes": num_bytes,
        }
        console.result(
            document,
            f"{folder}: {document['architecture']}, {document['dtype']}, {num_bytes / 1e9:.2f} GB",
        )
