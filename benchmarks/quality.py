"""Quality and cost of quantization methods on one model, through the commands that users type.

For each METHOD[:SCHEME] the model is quantized and compared with itself unquantized. A record holds
perplexity, KL divergence, top-1 agreement, seconds and peak memory. Example::

    python benchmarks/quality.py models/dithered --calibration texts.jsonl --text wiki.test.txt \\
        --run rtn --run awq --run awq:w4a16_sym --output benchmarks/results/quality-smollm2.json
"""

import argparse
import datetime
import json
import platform
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import quantforge


def main() -> None:
    arguments = parse()
    records = []
    with tempfile.TemporaryDirectory() as scratch:
        for run in arguments.run:
            method, _, scheme = run.partition(":")
            record = measure(arguments, method, scheme or "w4a16", Path(scratch) / "checkpoint")
            sys.stderr.write(json.dumps(record) + "\n")
            records.append(record)
            document = {**environment(arguments), "records": records}
            text = json.dumps(document, indent=2) + "\n"
            arguments.output.write_text(text, encoding="utf-8")  # each time: a run may be cut short


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="unquantized model folder")
    parser.add_argument("--calibration", default="bundled")
    parser.add_argument("--num-samples", type=int, default=128)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--text", default="bundled", help="text to evaluate on")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--run", action="append", required=True, help="METHOD[:SCHEME], repeatable")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


def measure(
    arguments: argparse.Namespace, method: str, scheme: str, folder: Path
) -> dict[str, Any]:
    """One record: quantize into `folder`, then compare with the source."""
    shared = ["--device", arguments.device, "--dtype", arguments.dtype, "--json", "--quiet"]
    quantized = quantforge_json(
        "quantize", str(arguments.model), "--method", method, "--scheme", scheme,
        "--calibration", arguments.calibration, "--num-samples", str(arguments.num_samples),
        "--sequence-length", str(arguments.sequence_length), "--output", str(folder),
        "--overwrite", *shared,
    )  # fmt: skip
    limit = [] if arguments.max_tokens is None else ["--max-tokens", str(arguments.max_tokens)]
    found = quantforge_json(
        "eval", "ppl", str(folder), "--baseline", str(arguments.model), "--data", arguments.text,
        "--window", str(arguments.window), *limit, *shared,
    )  # fmt: skip
    compared = found["comparison"]
    return {
        "method": method,
        "scheme": quantized["scheme"],
        "ppl": found["ppl"],
        "kl": compared["mean_kl"],
        "top1": compared["top1"],
        "ppl_baseline": compared["ppl_baseline"],
        "comparison": compared,
        "bits_per_weight": found["bits_per_weight"],
        "seconds": quantized["seconds"],
        "peak_device_bytes": quantized["peak_device_bytes"],
        "peak_host_bytes": quantized["peak_host_bytes"],
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
