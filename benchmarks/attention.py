"""Times the ops around the linears on a GPU: paged attention, norms, activation, rope, store.

Shapes are those of Llama-3.1-8B (32 query and 8 key/value heads of 128, hidden size 4096). Each
figure is the median over replays of a CUDA graph whose calls rotate over several sets of operands,
so that little of them is in the L2 cache. Example::

    python benchmarks/attention.py --output benchmarks/results/attention-h200.json
"""

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from quantforge_kernels import paged_attention, rms_norm, rope, silu_mul
from quantforge_kernels import paged_attention_triton as ours

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
CACHED_BYTES = 256 << 20
"""Operands of a graph's calls together, unless one set alone is larger."""

DECODES = [(1, 1024), (8, 1024), (64, 1024), (256, 1024), (1, 8192), (8, 8192), (64, 8192)]
DECODES += [(256, 8192), (1, 32768), (64, 32768)]


def graph_us(calls: list[Callable[[], Any]], replays: int = 15) -> float:
    """Median microseconds of one of `calls`, replayed one after another in a graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    rounds = max(1, 20 // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / (rounds * len(calls)))
    return statistics.median(times)


def decode_operands(batch: int, context: int, sets: int, kv_heads: int) -> list[tuple[Any, ...]]:
    pages = batch * (context // PAGE)
    found = []
    for _ in range(sets):
        table = torch.randperm(pages, device="cuda", dtype=torch.int64).int().reshape(batch, -1)
        found.append(
            (
                torch.randn(batch, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16),
                torch.randn(pages, PAGE, kv_heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16),
                torch.randn(pages, PAGE, kv_heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16),
                table,
                torch.full((batch,), context, device="cuda", dtype=torch.int32),
            )
        )
    return found


def decode_record(batch: int, context: int, options: dict[str, Any]) -> dict[str, Any]:
    num_bytes = batch * context * KV_HEADS * HEAD_DIM * 2 * 2
    sets = max(1, min(20, -(-CACHED_BYTES // num_bytes)))
    operands = decode_operands(batch, context, sets, KV_HEADS)

    def call(args: tuple[Any, ...]) -> Callable[[], Any]:
        q, k, v, table, contexts = args
        return lambda: ours.decode(q, k, v, table, contexts, HEAD_DIM**-0.5, None, **options)

    q, k, v, table, contexts = operands[0]
    starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
    error = None
    if num_bytes < 1 << 30:
        expected = paged_attention.reference(
            q, k, v, table, starts, contexts, HEAD_DIM**-0.5, None
        ).double()
        error = float((call(operands[0])().double() - expected).norm() / expected.norm())
    us = graph_us([call(args) for args in operands])
    return {
        "op": "paged_decode",
        "impl": "quantforge",
        "batch": batch,
        "context": context,
        "options": options,
        "us": round(us, 2),
        "gbps": round(num_bytes / us / 1000),
        "error": error,
    }


def prefill_record(tokens: int, options: dict[str, Any]) -> dict[str, Any]:
    pages = tokens // PAGE
    q = torch.randn(tokens, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(
        2, pages, PAGE, KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16
    ).unbind()
    table = torch.randperm(pages, device="cuda").int().reshape(1, -1)
    starts = torch.tensor([0, tokens], device="cuda", dtype=torch.int32)
    contexts = torch.tensor([tokens], device="cuda", dtype=torch.int32)
    args = (q, k, v, table, starts, contexts, HEAD_DIM**-0.5, None)
    us = graph_us([lambda: ours.mixed(*args, **options)])
    error = None
    if tokens <= 2048:
        expected = paged_attention.reference(*args).double()
        error = float((ours.mixed(*args, **options).double() - expected).norm() / expected.norm())
    flops = 4 * HEADS * HEAD_DIM * tokens * (tokens + 1) / 2
    return {
        "op": "paged_prefill",
        "impl": "quantforge",
        "tokens": tokens,
        "options": options,
        "us": round(us, 2),
        "tflops": round(flops / us / 1e6, 1),
        "error": error,
    }


def elementwise_records(tokens: int) -> list[dict[str, Any]]:
    """Ours through the op that a GPU selects, beside the reference; bytes read and written."""
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    x, residual = torch.randn(2, tokens, 4096, **bf16).unbind()
    weight = torch.randn(4096, **bf16)
    gate, up = torch.randn(tokens, 2 * 14336, **bf16).split(14336, dim=-1)
    q = torch.randn(tokens, HEADS, HEAD_DIM, **bf16)
    k = torch.randn(tokens, KV_HEADS, HEAD_DIM, **bf16)
    cos, sin = torch.randn(2, tokens, HEAD_DIM, **bf16).unbind()
    cases: list[tuple[Any, tuple[Any, ...], int]] = [
        (rms_norm.OP, (x, weight, 1e-5, residual), 4 * x.numel() * 2),
        (silu_mul.OP, (gate, up), 3 * gate.numel() * 2),
        (rope.OP, (q, k, cos, sin), 2 * 2 * (q.numel() + k.numel()) + 4 * cos.numel()),
    ]
    records = []
    for op, args, num_bytes in cases:
        problem = {"device": "cuda", "dtype": torch.bfloat16}
        for candidate in (op.select(**problem), op.reference):
            run = candidate.run
            us = graph_us([lambda run=run, args=args: run(*args)])
            records.append(
                {
                    "op": op.name,
                    "impl": candidate.name,
                    "tokens": tokens,
                    "us": round(us, 2),
                    "gbps": round(num_bytes / us / 1000),
                }
            )
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--sweep", action="store_true", help="try tiles, warps, stages and splits")
    parser.add_argument("--budget-s", type=float, default=150)
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.budget_s
    records: list[dict[str, Any]] = []
    document = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "records": records,
    }

    def keep(make: Callable[[], Any]) -> None:
        if time.monotonic() > deadline:
            return
        try:
            made = make()
        except Exception as error:  # noqa: BLE001 - one failing configuration must not end a sweep
            made = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
        for record in made if isinstance(made, list) else [made]:
            sys.stderr.write(json.dumps(record) + "\n")
            records.append(record)
        arguments.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    for tokens in (1, 64, 4096):
        keep(lambda tokens=tokens: elementwise_records(tokens))
    for batch, context in DECODES:
        keep(lambda b=batch, c=context: decode_record(b, c, {}))
    for tokens in (2048, 8192):
        keep(lambda tokens=tokens: prefill_record(tokens, {}))
    if arguments.sweep:
        for tile, warps, stages in ((64, 4, 2), (32, 4, 3), (128, 4, 2), (128, 8, 2), (64, 2, 3)):
            options = {"tile": tile, "num_warps": warps, "num_stages": stages}
            for batch, context in ((1, 8192), (64, 8192), (256, 1024)):
                keep(lambda b=batch, c=context, o=options: decode_record(b, c, o))
        for splits in (1, 2, 4):
            keep(lambda s=splits: decode_record(64, 8192, {"splits": s}))
        for splits in (16, 32, 64):
            keep(lambda s=splits: decode_record(1, 8192, {"splits": s}))
        for rows, tile, stages in ((128, 128, 2), (64, 64, 3), (128, 64, 2), (256, 64, 2)):
            options = {"rows": rows, "tile": tile, "num_stages": stages}
            keep(lambda o=options: prefill_record(8192, o))


if __name__ == "__main__":
    main()
