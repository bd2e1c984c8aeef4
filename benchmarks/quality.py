"""Quality and cost of quantization methods on one model, through the commands that users type.

For each METHOD[:SCHEME], or quoted options of ``quantize``, the model is quantized and compared
with itself unquantized. A record holds perplexity, KL divergence, top-1 agreement, seconds and peak
memory. Quantizations run one after another; evaluations, whose time does not matter, `--jobs` at a
time. Example::

    python benchmarks/quality.py models/dithered --calibration texts.jsonl --text wiki.test.txt \\
        --run rtn --run awq:w4a16_sym --run="--recipe best_w4a16" \\
        --output benchmarks/results/quality-smollm2.json
"""

import argparse
import datetime
import json
import platform
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import quantforge


def main() -> None:
    arguments = parse()
    records: list[dict[str, Any]] = []
    document = {**environment(arguments), "records": records}

    def keep(record: dict[str, Any]) -> None:
        sys.stderr.write(json.dumps(record) + "\n")
        records.append(record)
        text = json.dumps(document, indent=2) + "\n"
        arguments.output.write_text(text, encoding="utf-8")  # each time: a run may be cut short

    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(arguments.jobs) as pool:
        waiting = []
        for number, run in enumerate(arguments.run):
            folder = Path(scratch) / str(number)
            try:
                quantized = quantize(arguments, run, folder)
            except subprocess.CalledProcessError as error:
                keep({"run": run, "error": str(error)})
                continue
            waiting.append((run, quantized, folder))
        evaluated = [pool.submit(evaluate, arguments, folder) for _, _, folder in waiting]
        for (run, quantized, _), found in zip(waiting, evaluated, strict=True):
            keep(record_of(run, quantized, found.result()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="unquantized model folder")
    parser.add_argument("--baseline", type=Path, help="what to compare with; default: the model")
    parser.add_argument("--calibration", default="bundled")
    parser.add_argument("--num-samples", type=int, default=128)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--text", default="bundled", help="text to evaluate on")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--eval-dtype", help="dtype of the evaluation; default: --dtype")
    parser.add_argument("--run", action="append", required=True, help="METHOD[:SCHEME]; repeatable")
    parser.add_argument("--jobs", type=int, default=1, help="evaluations at a time")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


def shared_options(arguments: argparse.Namespace, dtype: str | None = None) -> list[str]:
    return ["--device", arguments.device, "--dtype", dtype or arguments.dtype, "--json", "--quiet"]


def quantize(arguments: argparse.Namespace, run: str, folder: Path) -> dict[str, Any]:
    """What the command says of `run`, written to `folder`."""
    if run.startswith("-"):
        chosen = shlex.split(run)
    else:
        method, _, scheme = run.partition(":")
        chosen = ["--method", method, "--scheme", scheme or "w4a16"]
    return quantforge_json(
        "quantize", str(arguments.model), *chosen,
        "--calibration", arguments.calibration, "--num-samples", str(arguments.num_samples),
        "--sequence-length", str(arguments.sequence_length), "--output", str(folder),
        *shared_options(arguments),
    )  # fmt: skip


def evaluate(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The checkpoint in `folder` beside the source."""
    limit = [] if arguments.max_tokens is None else ["--max-tokens", str(arguments.max_tokens)]
    baseline = arguments.baseline or arguments.model
    return quantforge_json(
        "eval", "ppl", str(folder), "--baseline", str(baseline), "--data", arguments.text,
        "--window", str(arguments.window), *limit,
        *shared_options(arguments, arguments.eval_dtype),
    )  # fmt: skip


def record_of(run: str, quantized: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    compared = found["comparison"]
    methods = Counter(layer["method"] for layer in quantized["layers"])
    return {
        "run": run,
        "method": quantized["method"],
        "scheme": quantized["scheme"],
        "ppl": found["ppl"],
        "kl": compared["mean_kl"],
        "top1": compared["top1"],
        "ppl_baseline": compared["ppl_baseline"],
        "comparison": compared,
        "bits_per_weight": found["bits_per_weight"],
        "methods_used": dict(methods),
        "seconds": quantized["seconds"],
        "peak_device_bytes": quantized["peak_device_bytes"],
        "peak_host_bytes": quantized["peak_host_bytes"],
        "peak_host_anonymous_bytes": quantized["peak_host_anonymous_bytes"],
        "evaluation_seconds": found["seconds"],
        "kernels": found["engine"],
    }


def quantforge_json(*arguments: str) -> dict[str, Any]:
    """The JSON document that a command prints; its errors end the run."""
    command = [sys.executable, "-m", "quantforge", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def environment(arguments: argparse.Namespace) -> dict[str, Any]:
    """Device, versions, date and command, for the results file."""
    on_gpu = torch.cuda.is_available() and not str(arguments.device).startswith("cpu")
    return {
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or "cpu",
        "versions": {
            "quantforge": quantforge.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
        "protocol": {
            "model": arguments.model.name,
            "calibration": f"{arguments.num_samples} x {arguments.sequence_length} tokens",
            "text": Path(arguments.text).name,
            "window": arguments.window,
        },
    }


if __name__ == "__main__":
    main()
