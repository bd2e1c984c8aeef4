"""``quantforge serve``: an OpenAI-compatible server for one model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantforge.cli.options import (
    DeviceOption,
    DTypeOption,
    JsonOption,
    KVCacheOption,
    ModelArgument,
    NoCudaGraphsOption,
    QuietOption,
)
from quantforge.errors import UsageError

if TYPE_CHECKING:
    from types import ModuleType


def register(app: typer.Typer) -> None:
    @app.command(
        epilog="Examples:  quantforge serve models/smollm2-awq --port 8000  |  "
        'curl http://127.0.0.1:8000/v1/completions -H "content-type: application/json" '
        '-d \'{"model": "smollm2-awq", "prompt": "The capital of France is"}\''
    )
    def serve(
        model: ModelArgument,
        host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
        port: Annotated[
            int, typer.Option(min=0, max=65535, help="Port; 0 takes any free one.")
        ] = 8000,
        served_model_name: Annotated[
            str | None, typer.Option(help="Name that clients use; default: the folder's name.")
        ] = None,
        max_model_len: Annotated[
            int | None, typer.Option(min=2, help="Most tokens of a prompt and its answer.")
        ] = None,
        api_key: Annotated[
            str | None,
            typer.Option(
                envvar="QUANTFORGE_API_KEY",
                help="Key that clients must send; better given as QUANTFORGE_API_KEY.",
            ),
        ] = None,
        insecure: Annotated[
            bool, typer.Option("--insecure", help="Allow other machines in without a key.")
        ] = False,
        device: DeviceOption = "auto",
        dtype: DTypeOption = "auto",
        kv_cache_dtype: KVCacheOption = "auto",
        no_cuda_graphs: NoCudaGraphsOption = False,
        json_output: JsonOption = False,
        quiet: QuietOption = False,
    ) -> None:
        """Serve a model over HTTP, as OpenAI's API does (completions, chat, models).

        Says its URL on stdout when ready. SIGTERM or Ctrl-C lets running requests finish first.
        """
        from quantforge.console import Console

        server = _serving()
        _check_access(server, host, api_key, insecure=insecure)
        bound = server.bind(host, port)

        from quantforge.models.source import resolve_model
        from quantforge.runtime.config import EngineConfig
        from quantforge.runtime.engine import Engine
        from quantforge.serving.app import create_app

        console = Console(json_output=json_output, quiet=quiet)
        with console.progress() as progress:
            folder = resolve_model(model, progress=progress)
            config = EngineConfig(
                device=device,
                dtype=dtype,
                max_model_len=max_model_len,
                kv_cache_dtype=kv_cache_dtype,
                cuda_graphs="off" if no_cuda_graphs else "auto",
            )
            engine = Engine.from_folder(folder, config, progress=progress)
        assert engine.tokenizer is not None, "a folder without a tokenizer was refused"
        name = served_model_name or model_name(model)
        url = server.url_of(bound)
        application = create_app(
            engine,
            engine.tokenizer,
            name,
            api_key=api_key,
            on_engine_failure=lambda: running.stop(),
        )
        running = server.Server(
            application,
            lambda: console.result(
                {
                    "url": url,
                    "model": name,
                    "max_model_len": engine.max_model_len,
                    "kv_cache": engine.kv_cache,
                },
                f"serving {name} at {url}/v1",
            ),
        )
        running.serve_on(bound)
        failure = application.state.worker.failure
        if failure is not None:
            raise failure


def model_name(model: str) -> str:
    """The name to serve `model` under: a folder's or file's own name, a hub id as it is."""
    path = Path(model)
    if path.is_dir():
        return path.resolve().name
    return path.stem if path.suffix == ".gguf" else model


def _serving() -> "ModuleType":
    try:
        from quantforge.serving import server
    except ModuleNotFoundError as error:
        raise UsageError(
            f"serving needs the package {error.name!r}, which is not installed; "
            'run: pip install "quantforge[serve]"'
        ) from error
    return server


def _check_access(server: "ModuleType", host: str, api_key: str | None, *, insecure: bool) -> None:
    if not (server.is_loopback(host) or api_key or insecure):
        raise UsageError(
            f"--host {host} lets other machines in; set QUANTFORGE_API_KEY (or --api-key), "
            "or say --insecure"
        )
