"""``quantforge bench``: times the engine. ``bench latency`` gives milliseconds a token by batch."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantforge.cli.options import DeviceOption, DTypeOption, JsonOption, QuietOption
from quantforge.errors import UsageError

if TYPE_CHECKING:
    from quantforge.models.decoder import Decoder
    from quantforge.progress import Progress
    from quantforge.runtime.config import EngineConfig
    from quantforge.runtime.latency import Workload

DENSE = "dense"


def register(app: typer.Typer) -> None:
    commands = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(commands, name="bench", help="Time the engine that serves.")

    @commands.callback()
    def root() -> None:
        pass

    @commands.command(
        epilog="Examples:  quantforge bench latency models/smollm2-awq --batch-size 1 --batch-size "
        "8  |  quantforge bench latency --synthetic llama-3.1-8b:w4a16_sym --output engine.json"
    )
    def latency(
        model: Annotated[
            str | None,
            typer.Argument(
                metavar="[MODEL]", help="A local model folder, a .gguf file, or a Hugging Face id."
            ),
        ] = None,
        synthetic: Annotated[
            str | None,
            typer.Option(
                "--synthetic",
                metavar="SHAPE:SCHEME",
                help="Random weights instead of MODEL: llama-3.1-8b, llama-3.1-70b, qwen3-8b or "
                "smollm2-135m, and a preset such as w4a16_sym or fp8_dynamic, or dense.",
            ),
        ] = None,
        lm_head: Annotated[
            str,
            typer.Option("--lm-head", help="Preset of a synthetic model's lm_head, or dense."),
        ] = DENSE,
        num_layers: Annotated[
            int | None,
            typer.Option("--num-layers", min=1, help="Layers of a synthetic model, if not all."),
        ] = None,
        batch_size: Annotated[
            list[int] | None,
            typer.Option(
                "--batch-size", min=1, help="Requests at a time; repeatable. Default: 1 to 256."
            ),
        ] = None,
        input_len: Annotated[
            int, typer.Option("--input-len", min=1, help="Prompt tokens of a request.")
        ] = 128,
        output_len: Annotated[
            int, typer.Option("--output-len", min=2, help="Tokens that each request writes.")
        ] = 64,
        cuda_graphs: Annotated[
            list[str] | None,
            typer.Option("--cuda-graphs", help="auto, on or off; repeat to compare them."),
        ] = None,
        max_num_batched_tokens: Annotated[
            int, typer.Option("--max-num-batched-tokens", min=1, help="Most tokens of a step.")
        ] = 8192,
        profile: Annotated[
            bool, typer.Option("--profile", help="Also list the kernels of a decode step.")
        ] = False,
        output: Annotated[
            Path | None,
            typer.Option(
                "--output", help="Also add the records to those of this JSON file, one by one."
            ),
        ] = None,
        device: DeviceOption = "auto",
        dtype: DTypeOption = "auto",
        json_output: JsonOption = False,
        quiet: QuietOption = False,
    ) -> None:
        """Time from token to token, and to the first, when so many requests decode together."""
        import dataclasses
        import time

        from quantforge.console import Console
        from quantforge.runtime.config import EngineConfig
        from quantforge.runtime.engine import Engine
        from quantforge.runtime.latency import Workload

        if (model is None) == (synthetic is None):
            raise UsageError("give either MODEL or --synthetic SHAPE:SCHEME")
        earlier = _records_of(output)
        batches = sorted(set(batch_size or (1, 8, 32, 64, 128, 256)))
        base = EngineConfig(
            device=device,
            dtype=dtype,
            max_num_seqs=batches[-1],
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=input_len + output_len,
        )
        modes = [dataclasses.replace(base, cuda_graphs=mode) for mode in cuda_graphs or ["auto"]]
        console = Console(json_output=json_output, quiet=quiet)
        begin = time.perf_counter()
        with console.progress() as progress:
            decoder, described = _decoder(model, synthetic, lm_head, num_layers, base, progress)
        load_s = time.perf_counter() - begin
        described = {**_machine(decoder), **described, "load_s": round(load_s, 2)}
        records: list[dict[str, Any]] = []
        workloads = [Workload(batch=b, input_len=input_len, output_len=output_len) for b in batches]
        for config in modes:
            begin = time.perf_counter()
            engine = Engine(decoder, None, config)
            startup_s = load_s + time.perf_counter() - begin
            for record in _measure(engine, workloads, profile=profile):
                records.append({**described, "startup_s": round(startup_s, 2), **record})
                console.say(_line(records[-1]))
                _write(output, [*earlier, *records])
            del engine
        console.result({"records": records}, "\n".join(_line(record) for record in records))


def _decoder(
    model: str | None,
    synthetic: str | None,
    lm_head: str,
    num_layers: int | None,
    config: "EngineConfig",
    progress: "Progress",
) -> tuple["Decoder", dict[str, Any]]:
    """The model to be timed, and what records say of it."""
    import dataclasses

    from quantforge.checkpoint.reader import CheckpointReader
    from quantforge.device import resolve_device, resolve_dtype
    from quantforge.models.loader import load_config, load_decoder
    from quantforge.models.source import resolve_model
    from quantforge.models.synthetic import shape_named, synthetic_decoder
    from quantforge.schemes import preset

    device = resolve_device(config.device)
    if model is not None:
        if lm_head != DENSE or num_layers is not None:
            raise UsageError("--lm-head and --num-layers belong to --synthetic")
        reader = CheckpointReader(resolve_model(model, progress=progress))
        dtype = resolve_dtype(config.dtype, device, load_config(reader.config).dtype)
        decoder = load_decoder(reader, device=device, dtype=dtype, progress=progress)
        return decoder, {"model": model, "scheme": "as stored", "lm_head": "as stored"}
    assert synthetic is not None
    name, _, scheme = synthetic.partition(":")
    scheme = scheme or DENSE
    shape = shape_named(name)
    if num_layers is not None:
        shape = dataclasses.replace(shape, num_layers=num_layers)
    decoder = synthetic_decoder(
        shape,
        None if scheme == DENSE else preset(scheme),
        device=device,
        dtype=resolve_dtype(config.dtype, device, shape.dtype),
        lm_head=None if lm_head == DENSE else preset(lm_head),
    )
    described = {"model": f"synthetic {name}", "scheme": scheme, "lm_head": lm_head}
    return decoder, described | ({} if num_layers is None else {"num_layers": num_layers})


def _measure(
    engine: Any, workloads: Sequence["Workload"], *, profile: bool
) -> Iterator[dict[str, Any]]:
    """A record for each workload."""
    import dataclasses

    import torch

    from quantforge.runtime.latency import measure_latency, profile_steps

    on_gpu = engine.device.type == "cuda"
    for workload in workloads:
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(engine.device)
        found = measure_latency(engine, workload)
        record: dict[str, Any] = {
            "workload": str(workload),
            "batch": workload.batch,
            "kernels": engine.kernels(),
            **{name: round(value, 3) for name, value in dataclasses.asdict(found).items()},
            "peak_bytes": torch.cuda.max_memory_allocated(engine.device) if on_gpu else None,
        }
        if profile:
            record["profile"] = profile_steps(engine, workload)
        yield record


def _machine(decoder: "Decoder") -> dict[str, Any]:
    """What a figure depends on beside the code."""
    import datetime
    import platform

    import torch

    device = decoder.embed_tokens.device
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "dtype": str(decoder.embed_tokens.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
    }


def _line(record: dict[str, Any]) -> str:
    return (
        f"{record['model']} {record['scheme']} batch {record['batch']:>4}: "
        f"{record['itl_ms']:8.3f} ms a token, {record['out_tok_s']:9.1f} tokens/s, first token "
        f"after {record['ttft_ms']:.1f} ms ({record['kernels']['decode_step']})"
    )


def _records_of(output: Path | None) -> list[dict[str, Any]]:
    """The records that the file to be written holds. Raises `UsageError` if it is something else,
    or cannot be written."""
    import json

    if output is None:
        return []
    if not output.parent.is_dir():
        raise UsageError(f"--output {output}: the folder {output.parent} does not exist")
    if not output.exists():
        return []
    try:
        records = json.loads(output.read_text(encoding="utf-8"))["records"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"--output {output} holds no records of this command") from error
    if not isinstance(records, list):
        raise UsageError(f"--output {output} holds no records of this command")
    return records


def _write(output: Path | None, records: Sequence[dict[str, Any]]) -> None:
    import json

    if output is not None:
        output.write_text(json.dumps({"records": records}, indent=2) + "\n", encoding="utf-8")
