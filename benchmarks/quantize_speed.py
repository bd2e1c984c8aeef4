"""Time and memory of ``quantforge quantize`` on a model of the shape of Llama-3.1-8B, or any other.

Without ``--model`` a model of random weights is made first, on the GPU if there is one. Its norms
differ by channel, as those of trained models do: a search of scales would end early otherwise. Each
method then runs as a command of its own, whose anonymous memory is looked at from outside::

    python benchmarks/quantize_speed.py --tokenizer models/smollm2 --method awq --method gptq \\
        --output benchmarks/results/quantize-speed-h200.json
    python benchmarks/quantize_speed.py --model models/smollm2 --method awq --output smollm2.json
    python benchmarks/quantize_speed.py --tokenizer models/smollm2 --layers 2 --hidden 256 \\
        --intermediate 512 --heads 4 --kv-heads 2 --num-samples 4 --sequence-length 64 \\
        --method awq --output small.json
"""

import argparse
import datetime
import json
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import quantforge
from quantforge.checkpoint.writer import CheckpointWriter

STANDARD_DEVIATION = 0.02
NORM_SPREAD = 0.5
"""Standard deviation of the logarithm of the norms' weights."""
SAMPLE_SECONDS = 0.05
DEVICE_SAMPLE_SECONDS = 0.5
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def main() -> None:
    arguments = parse()
    arguments.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        source = arguments.model or make_model(arguments, Path(scratch) / "model")
        records = []
        for method in arguments.method:
            record = measure(arguments, method, source, Path(scratch) / f"out-{method}")
            sys.stderr.write(json.dumps(record) + "\n")
            records.append(record)
            document = {**environment(arguments), "records": records}
            text = json.dumps(document, indent=2) + "\n"
            arguments.output.write_text(text, encoding="utf-8")  # each time: a run may be cut short


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="existing model folder; default: make one")
    parser.add_argument("--tokenizer", type=Path, help="folder whose tokenizer a made model gets")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=14336)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--weights", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--method", action="append", required=True, help="repeatable")
    parser.add_argument("--scheme", default="w4a16")
    parser.add_argument("--calibration", default="bundled")
    parser.add_argument("--num-samples", type=int, default=128)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.model is None and arguments.tokenizer is None:
        parser.error("a model that is made needs --tokenizer FOLDER")
    return arguments


def make_model(arguments: argparse.Namespace, folder: Path) -> Path:
    """A Llama of the sizes asked for, in shards of 5 GB."""
    dtype = getattr(torch, arguments.weights)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with CheckpointWriter(folder) as writer:
        for name, shape in tensor_shapes(arguments):
            tensor = torch.empty(shape, dtype=dtype, device=device)
            if len(shape) == 2:
                tensor.normal_(std=STANDARD_DEVIATION)
            else:
                tensor.normal_(std=NORM_SPREAD).exp_()
            writer.add(name, tensor)
        for name in TOKENIZER_FILES:
            if (arguments.tokenizer / name).is_file():
                writer.copy_file(arguments.tokenizer / name)
        writer.commit(config(arguments))
    if device == "cuda":
        torch.cuda.empty_cache()
    return folder


def tensor_shapes(arguments: argparse.Namespace) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, mlp = arguments.hidden, arguments.intermediate
    kv_size = hidden // arguments.heads * arguments.kv_heads
    yield "model.embed_tokens.weight", (arguments.vocab, hidden)
    for layer in range(arguments.layers):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}self_attn.q_proj.weight", (hidden, hidden)
        yield f"{prefix}self_attn.k_proj.weight", (kv_size, hidden)
        yield f"{prefix}self_attn.v_proj.weight", (kv_size, hidden)
        yield f"{prefix}self_attn.o_proj.weight", (hidden, hidden)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}mlp.gate_proj.weight", (mlp, hidden)
        yield f"{prefix}mlp.up_proj.weight", (mlp, hidden)
        yield f"{prefix}mlp.down_proj.weight", (hidden, mlp)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (arguments.vocab, hidden)


def config(arguments: argparse.Namespace) -> dict[str, Any]:
    """Llama 3.1's config.json with the sizes asked for."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": arguments.hidden,
        "intermediate_size": arguments.intermediate,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": arguments.heads,
        "num_key_value_heads": arguments.kv_heads,
        "vocab_size": arguments.vocab,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": arguments.weights,
    }


def measure(
    arguments: argparse.Namespace, method: str, source: Path, folder: Path
) -> dict[str, Any]:
    """One record: the command's own figures, and what is seen of it from outside."""
    command = [
        sys.executable, "-m", "quantforge", "quantize", str(source), "--method", method,
        "--scheme", arguments.scheme, "--calibration", arguments.calibration,
        "--num-samples", str(arguments.num_samples),
        "--sequence-length", str(arguments.sequence_length), "--output", str(folder),
        "--device", arguments.device, "--dtype", arguments.dtype, "--json", "--quiet",
    ]  # fmt: skip
    used_before = device_used_bytes()
    document, wall_seconds, peak_anonymous, device_used = watch(command)
    shutil.rmtree(folder)
    return {
        "method": method,
        "scheme": document["scheme"],
        "wall_seconds": round(wall_seconds, 2),
        "seconds": document["seconds"],
        "peak_device_bytes": document["peak_device_bytes"],
        "peak_device_used_bytes": device_used - used_before,
        "peak_host_anonymous_bytes": max(peak_anonymous, document["peak_host_anonymous_bytes"]),
        "peak_host_bytes": document["peak_host_bytes"],
        "source_bytes": sum(path.stat().st_size for path in source.glob("*.safetensors")),
        "output_bytes": document["written_bytes"],
        "worst_output_error": max(
            (e for layer in document["layers"] if (e := layer["output_error"]) is not None),
            default=None,
        ),
    }


def watch(command: list[str]) -> tuple[dict[str, Any], float, int, int]:
    """(document, wall seconds, peak anonymous host bytes, peak bytes in use on the GPU)."""
    started = time.perf_counter()
    peak_anonymous, peak_used, looked = 0, 0, 0.0
    with tempfile.TemporaryFile("w+", encoding="utf-8") as printed:
        running = subprocess.Popen(command, stdout=printed)
        while running.poll() is None:
            peak_anonymous = max(peak_anonymous, anonymous_bytes(running.pid))
            if time.perf_counter() - looked > DEVICE_SAMPLE_SECONDS:
                peak_used, looked = max(peak_used, device_used_bytes()), time.perf_counter()
            time.sleep(SAMPLE_SECONDS)
        wall_seconds = time.perf_counter() - started
        if running.returncode:
            raise SystemExit(f"{shlex.join(command)} ended with code {running.returncode}")
        printed.seek(0)
        document: dict[str, Any] = json.load(printed)
    return document, wall_seconds, peak_anonymous, peak_used


def anonymous_bytes(pid: int) -> int:
    """Resident memory of a process that is not mapped from files; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(n.split()[1]) * 1024 for n in lines if n.startswith("RssAnon:")), 0)


def device_used_bytes() -> int:
    """Memory in use on the first GPU, contexts and caches included; 0 without nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    query = [program, "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    found = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return int(found) << 20 if found.isdigit() else 0


def environment(arguments: argparse.Namespace) -> dict[str, Any]:
    """Device, versions, date and command, for the results file."""
    on_gpu = torch.cuda.is_available() and not str(arguments.device).startswith("cpu")
    made = {
        "layers": arguments.layers,
        "hidden": arguments.hidden,
        "intermediate": arguments.intermediate,
        "heads": arguments.heads,
        "kv_heads": arguments.kv_heads,
        "vocab": arguments.vocab,
        "weights": arguments.weights,
    }
    return {
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or "cpu",
        "versions": {
            "quantforge": quantforge.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
        "model": made if arguments.model is None else arguments.model.name,
        "calibration": f"{arguments.num_samples} x {arguments.sequence_length} tokens",
    }


if __name__ == "__main__":
    main()
