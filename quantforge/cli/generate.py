"""``quantforge generate``: completes prompts; one prompt is shown while it is written."""

import sys
import time
from collections.abc import Sequence
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
from quantforge.errors import QuantForgeError, UsageError

if TYPE_CHECKING:
    from quantforge.models.tokenizer import Tokenizer
    from quantforge.runtime.engine import Engine
    from quantforge.runtime.request import Completion, SamplingParams


def register(app: typer.Typer) -> None:
    @app.command(
        epilog="Examples:  quantforge generate models/smollm2-awq --prompt 'The capital of France "
        "is'  |  quantforge generate models/smollm2-awq --chat --prompt 'Name three rivers.'  |  "
        "quantforge generate models/smollm2-awq --prompt-file prompts.txt --json > out.json"
    )
    def generate(
        model: ModelArgument,
        prompt: Annotated[
            list[str] | None, typer.Option("--prompt", "-p", help="Text to go on from; repeatable.")
        ] = None,
        prompt_file: Annotated[
            Path | None,
            typer.Option("--prompt-file", help="A text file with one prompt a line."),
        ] = None,
        chat: Annotated[
            bool, typer.Option("--chat", help="Send each prompt as a user's message in a chat.")
        ] = False,
        max_tokens: Annotated[int, typer.Option("--max-tokens", help="Most tokens to write.")] = 64,
        temperature: Annotated[
            float, typer.Option("--temperature", help="0 always takes the likeliest token.")
        ] = 0.0,
        top_k: Annotated[int, typer.Option("--top-k", help="Likeliest tokens kept; 0: all.")] = 0,
        top_p: Annotated[float, typer.Option("--top-p", help="Probability kept, in (0, 1].")] = 1.0,
        seed: Annotated[int, typer.Option("--seed", help="For temperatures above 0.")] = 0,
        stop: Annotated[
            list[str] | None, typer.Option("--stop", help="Text to stop before; repeatable.")
        ] = None,
        max_model_len: Annotated[
            int | None, typer.Option("--max-model-len", help="Most tokens of prompt and answer.")
        ] = None,
        device: DeviceOption = "auto",
        dtype: DTypeOption = "auto",
        kv_cache_dtype: KVCacheOption = "auto",
        no_cuda_graphs: NoCudaGraphsOption = False,
        json_output: JsonOption = False,
        quiet: QuietOption = False,
    ) -> None:
        """Complete prompts. Several are computed in one batch, and printed in their order."""
        from quantforge.console import Console
        from quantforge.models.source import resolve_model
        from quantforge.runtime.config import EngineConfig
        from quantforge.runtime.engine import Engine
        from quantforge.runtime.request import SamplingParams

        console = Console(json_output=json_output, quiet=quiet)
        texts = _prompts(prompt or [], prompt_file)
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            stop=tuple(stop or ()),
        )
        config = EngineConfig(
            device=device,
            dtype=dtype,
            max_model_len=max_model_len,
            kv_cache_dtype=kv_cache_dtype,
            cuda_graphs="off" if no_cuda_graphs else "auto",
            seed=seed,
        )
        with console.progress() as progress:
            folder = resolve_model(model, progress=progress)
            engine = Engine.from_folder(folder, config, progress=progress)
        assert engine.tokenizer is not None
        prompts = [_encode(engine.tokenizer, text, chat=chat) for text in texts]
        started = time.perf_counter()
        if len(prompts) == 1 and not json_output:
            num_tokens = _stream(engine, prompts[0], params)
        else:
            with console.progress() as progress:
                completions = engine.generate(prompts, params, progress)
            document = _document(model, engine, texts, prompts, completions)
            console.result(document, _listing(texts, completions))
            num_tokens = sum(len(completion.token_ids) for completion in completions)
        seconds = time.perf_counter() - started
        console.say(
            f"{num_tokens} tokens in {seconds:.1f} s ({num_tokens / seconds:.1f} tokens/s, "
            f"{engine.device}, {str(engine.dtype).removeprefix('torch.')})"
        )


def _prompts(given: Sequence[str], file: Path | None) -> list[str]:
    """The prompts of the options. Raises `UsageError` if there is none."""
    texts = list(given)
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--prompt-file {file} cannot be read: {error}") from error
        texts += [line for line in lines if line.strip()]
    if not texts:
        raise UsageError("there is no prompt; give --prompt TEXT or --prompt-file FILE")
    return texts


def _encode(tokenizer: "Tokenizer", text: str, *, chat: bool) -> list[int]:
    """Tokens of a prompt, with the special tokens that the tokenizer puts around plain text."""
    if chat:
        return tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": text}]))
    return tokenizer.encode(text, add_special_tokens=True)


def _stream(engine: "Engine", prompt: Sequence[int], params: "SamplingParams") -> int:
    """Writes the text to stdout as it comes; the number of tokens."""
    engine.add_request("prompt", prompt, params)
    num_tokens = 0
    while engine.has_work():
        for output in engine.step():
            num_tokens += len(output.token_ids)
            sys.stdout.write(output.text)
            sys.stdout.flush()
            if output.finish_reason == "error":
                raise QuantForgeError(f"the generation failed: {output.error}")
    sys.stdout.write("\n")
    sys.stdout.flush()
    return num_tokens


def _document(
    model: str,
    engine: "Engine",
    texts: Sequence[str],
    prompts: Sequence[Sequence[int]],
    completions: Sequence["Completion"],
) -> dict[str, object]:
    return {
        "model": model,
        "device": str(engine.device),
        "dtype": str(engine.dtype).removeprefix("torch."),
        "kv_cache": engine.kv_cache,
        "kernels": engine.kernels(),
        "completions": [
            {
                "prompt": text,
                "num_prompt_tokens": len(prompt),
                "text": completion.text,
                "token_ids": list(completion.token_ids),
                "finish_reason": completion.finish_reason,
            }
            for text, prompt, completion in zip(texts, prompts, completions, strict=True)
        ],
    }


def _listing(texts: Sequence[str], completions: Sequence["Completion"]) -> str:
    """Prompts with their completions, for people."""
    pairs = enumerate(zip(texts, completions, strict=True), start=1)
    return "\n\n".join(f"[{at}] {text}\n{completion.text}" for at, (text, completion) in pairs)
