"""Time of kernels on this GPU, beside those of other projects: ``make bench-kernels``.

Launches are captured in CUDA graphs over weights that rotate (cold L2 cache), medians of replays;
a record holds op, impl, K, N, M, microseconds, GB/s and TFLOP/s of what the product must move and
do, and the relative RMS error against a float64 product of the same weights. Peers run in the same
process where they import: cuBLAS bfloat16, ``torch._weight_int4pack_mm`` (tinygemm),
humming-kernels and gemlite. The file is written after each shape and implementation; errors go to
stderr and the rest goes on.
"""

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from quantforge_kernels import w4a16
from quantforge_kernels.timing import copies_to_be_cold, graph_us
from torch import Tensor

SHAPES = {
    "8B": ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)),
    "70B": ((8192, 10240), (8192, 8192), (8192, 57344), (28672, 8192)),
}
"""(K, N) of qkv, o, gate_up and down of Llama models."""

TOKENS = (1, 4, 16, 32, 64, 128, 256, 1024, 4096)
GROUP = 128
Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A symmetric int4 weight in groups of `GROUP`, and how many copies of it must rotate."""

    codes: Tensor
    scale: Tensor
    copies: int

    @property
    def weight(self) -> Tensor:
        return w4a16.dequantize(self.codes, self.scale, None, torch.bfloat16)


def make_problem(n: int, k: int) -> Problem:
    generator = torch.Generator("cuda").manual_seed(n + k)
    codes = torch.randint(-8, 8, (n, k), generator=generator, device="cuda", dtype=torch.int8)
    scale = 0.001 + 0.01 * torch.rand(n, k // GROUP, generator=generator, device="cuda")
    return Problem(
        codes=codes, scale=scale.to(torch.bfloat16), copies=copies_to_be_cold(n * k // 2)
    )


def ours(problem: Problem) -> list[Run]:
    n, k = problem.codes.shape
    candidate = w4a16.OP.select(
        mode="triton",
        device="cuda",
        dtype=torch.bfloat16,
        shape=(n, k),
        num_bits=4,
        symmetric=True,
        group_size=GROUP,
    )
    assert candidate.repack is not None

    def one() -> Run:
        operands = candidate.repack(problem.codes, problem.scale, None, torch.bfloat16)
        return lambda x: candidate.run(x, *operands, None)

    return [one() for _ in range(problem.copies)]


def cublas(problem: Problem) -> list[Run]:
    def one() -> Run:
        weight = problem.weight
        return lambda x: torch.nn.functional.linear(x, weight)

    return [one() for _ in range(max(4, problem.copies // 4))]


def tinygemm(problem: Problem) -> list[Run]:
    nibbles = (problem.codes + 8).to(torch.uint8)
    packed = nibbles[:, 0::2] << 4 | nibbles[:, 1::2]  # the even column in the high half
    scale = problem.scale.T
    scale_and_zero = torch.stack((scale, torch.zeros_like(scale)), dim=-1).contiguous()

    def one() -> Run:
        weight = torch._convert_weight_to_int4pack(packed, 8)
        meta = scale_and_zero.clone()
        return lambda x: torch._weight_int4pack_mm(x, weight, GROUP, meta)

    return [one() for _ in range(problem.copies)]


def humming(problem: Problem) -> list[Run]:
    from humming.layer import HummingLayer

    n, k = problem.codes.shape
    config = {"dtype": "uint4", "group_size": GROUP, "scale_dtype": "bfloat16"}
    layer = HummingLayer(
        shape_n=n, shape_k=k, weight_config=config, torch_dtype=torch.bfloat16
    ).cuda()
    eights = (problem.codes + 8).to(torch.int64).reshape(n, k // 8, 8)
    words = sum(eights[..., i] << (4 * i) for i in range(8))
    layer.weight.data = words.to(torch.int32)  # the low 32 bits
    layer.weight_scale.data = problem.scale.clone()
    layer.transform()
    return [layer, *(copy.deepcopy(layer) for _ in range(problem.copies - 1))]


def gemlite(problem: Problem) -> list[Run]:
    from gemlite.core import DType, GemLiteLinearTriton

    n, k = problem.codes.shape

    def one() -> Run:
        layer = GemLiteLinearTriton(4, GROUP, k, n, input_dtype=DType.BF16, output_dtype=DType.BF16)
        codes = (problem.codes + 8).to(torch.uint8)
        layer.pack(
            codes, problem.scale.reshape(-1, 1), torch.full_like(problem.scale, 8).reshape(-1, 1)
        )
        return layer

    return [one() for _ in range(problem.copies)]


IMPLEMENTATIONS: dict[str, Callable[[Problem], list[Run]]] = {
    "quantforge": ours,
    "cublas-bf16": cublas,
    "humming": humming,
    "tinygemm": tinygemm,
    "gemlite": gemlite,
}
LARGEST_M = {"tinygemm": 256, "gemlite": 256}
"""Beyond this an implementation is far behind, and takes the time of the others."""


def relative_error(run: Run, x_MK: Tensor, problem: Problem) -> float:
    """RMS of the difference from the float64 product over the RMS of that."""
    spread = problem.scale.double().repeat_interleave(GROUP, dim=1)
    expected = x_MK.double() @ (problem.codes.double() * spread).T
    return ((run(x_MK).double() - expected).norm() / expected.norm()).item()


def measure(name: str, runs: list[Run], m: int, problem: Problem) -> dict[str, Any]:
    """One record."""
    n, k = problem.codes.shape
    generator = torch.Generator("cuda").manual_seed(m)
    x_MK = torch.randn(m, k, generator=generator, device="cuda").to(torch.bfloat16)
    error = relative_error(runs[0], x_MK, problem)
    us = graph_us([lambda run=run: run(x_MK) for run in runs], replays=15)
    weight_bytes = 2 * n * k if name == "cublas-bf16" else n * k // 2 + 2 * n * k // GROUP
    moved = weight_bytes + 2 * m * (n + k)
    return {
        "op": "w4a16",
        "impl": name,
        "K": k,
        "N": n,
        "M": m,
        "us": round(us, 2),
        "gbps": round(moved / us / 1000),
        "tflops": round(2 * m * n * k / us / 1e6, 1),
        "error": float(f"{error:.3g}"),
    }


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def environment() -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "timing": "CUDA graph over rotating weights (cold L2), median of 15 replays",
    }


def run_all(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The records, written to the output file as they come."""
    deadline = time.monotonic() + arguments.budget_s
    records: list[dict[str, Any]] = []
    for k, n in arguments.shapes:
        problem = make_problem(n, k)
        for name in arguments.impl:
            try:
                runs = IMPLEMENTATIONS[name](problem)
            except Exception as error:  # noqa: BLE001 (a peer that fails leaves the others)
                say(f"{name} K={k} N={n}: {type(error).__name__}: {str(error)[-300:]}")
                continue
            for m in arguments.ms:
                if time.monotonic() > deadline:
                    say("time is up")
                    return records
                if m > LARGEST_M.get(name, m):
                    continue
                try:
                    record = measure(name, runs, m, problem)
                except Exception as error:  # noqa: BLE001 (as above)
                    say(f"{name} K={k} N={n} M={m}: {type(error).__name__}: {str(error)[-300:]}")
                    continue
                records.append(record)
                say(json.dumps(record))
            del runs
            write(arguments.output, records)
        del problem
    return records


def write(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {**environment(), "records": records}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def table(records: list[dict[str, Any]]) -> str:
    """Microseconds by shape, and how many times faster than the best peer ours is."""
    us = {(r["K"], r["N"], r["impl"], r["M"]): r["us"] for r in records}
    tokens = sorted({r["M"] for r in records})
    lines = []
    for k, n in dict.fromkeys((r["K"], r["N"]) for r in records):
        lines.append(f"K={k} N={n}".ljust(22) + "".join(f"{f'M={m}':>9}" for m in tokens))
        names = [i for i in IMPLEMENTATIONS if any((k, n, i, m) in us for m in tokens)]
        for name in names:
            cells = (us.get((k, n, name, m)) for m in tokens)
            lines.append(f"  {name:20}" + "".join(f"{'-' if c is None else c:>9}" for c in cells))
        ratios = [ratio(us, k, n, m, names) for m in tokens]
        lines.append("  best peer / ours    " + "".join(f"{r:>9}" for r in ratios))
    for size, shapes in SHAPES.items():
        for name in IMPLEMENTATIONS:
            found = [us.get((k, n, name, 1)) for k, n in shapes]
            if None not in found:
                lines.append(f"{size} linears, M=1, {name}: {sum(found):.1f} us")  # type: ignore[arg-type]
    return "\n".join(lines)


def ratio(
    us: dict[tuple[int, int, str, int], float], k: int, n: int, m: int, names: list[str]
) -> str:
    mine = us.get((k, n, "quantforge", m))
    peers = [us[k, n, i, m] for i in names if i != "quantforge" and (k, n, i, m) in us]
    return f"{min(peers) / mine:.2f}" if mine and peers else "-"


def parse() -> argparse.Namespace:
    def shapes(text: str) -> list[tuple[int, int]]:
        if text in SHAPES:
            return list(SHAPES[text])
        return [(int(a), int(b)) for a, b in (part.split("x") for part in text.split(","))]

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--shapes", type=shapes, default=[s for v in SHAPES.values() for s in v])
    parser.add_argument("--ms", type=lambda t: [int(m) for m in t.split(",")], default=list(TOKENS))
    parser.add_argument("--impl", type=lambda t: t.split(","), default=list(IMPLEMENTATIONS))
    parser.add_argument("--budget-s", type=float, default=1800)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    records = run_all(arguments)
    write(arguments.output, records)
    sys.stdout.write(table(records) + "\n")


if __name__ == "__main__":
    main()
