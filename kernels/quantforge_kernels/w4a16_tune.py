"""Find the fastest `w4a16` config for shapes and batch sizes on this GPU, within a time limit.

``python -m quantforge_kernels.w4a16_tune --output w4a16-nvidia-h200.json`` tries a list of configs
for each (N, K, M): first without programmatic dependent launch, then the best few with it. Configs
are compiled and checked by several processes before anything is timed; those that spill registers
or give wrong results are dropped. The file is written after each pair and is what `w4a16_configs`
reads; records already in it are kept unless they are measured again.
"""

import argparse
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from quantforge_kernels.timing import copies_to_be_cold, graph_us
from quantforge_kernels.w4a16_configs import DEQUANTIZE, Config
from quantforge_kernels.w4a16_layout import MAX_SPLIT_BLOCKS_M, PackedWeight, pack

SHAPES = (  # (K, N) of the linears of 8B and 70B Llama models
    (4096, 6144),
    (4096, 4096),
    (4096, 28672),
    (14336, 4096),
    (8192, 10240),
    (8192, 8192),
    (8192, 57344),
    (28672, 8192),
)
TOKENS = (1, 16, 32, 64, 128, 256, 512, 1024)
SHARED_MEMORY_BYTES = 232_448
NUM_SMS = 132


def tile_configs(m: int) -> list[Config]:
    """Ways to cut the tiles for `m` tokens, all with one part of K and no dependent launch."""
    if m <= 16:
        block_m, stages, tiles = (16,), (3, 4, 6), (1, 2)
    elif m <= 32:
        block_m, stages, tiles = (32,), (3, 4), (1, 2)
    elif m <= 64:
        block_m, stages, tiles = (64,), (3, 4), (1, 2)
    else:
        block_m, stages, tiles = (64, 128), (2, 3, 4), (1,)
    shapes = ((64, 4), (128, 8), (128, 4)) if m <= 64 else ((64, 4), (128, 8))
    return [
        Config(block_m=bm, block_n=bn, num_warps=warps, num_stages=s, tiles=t)
        for bm in block_m
        for bn, warps in shapes
        for s in stages
        for t in tiles
        if shared_bytes(bm, bn, t, s) <= SHARED_MEMORY_BYTES
    ]


def shared_bytes(block_m: int, block_n: int, tiles: int, stages: int) -> int:
    """Roughly the shared memory of a config: inputs, words and meta of all stages."""
    return stages * tiles * (256 * block_m + 64 * block_n + 4 * block_n)


def splits(m: int, n: int, k: int, config: Config) -> Iterable[int]:
    """Numbers of parts of K worth trying: enough blocks to fill the GPU, not many times over."""
    blocks = -(-m // config.block_m) * -(-n // config.block_n)
    steps = k // (128 * config.tiles)
    for split in (1, 2, 3, 4, 6, 8):
        full = 0.6 * NUM_SMS <= blocks * split <= 8 * NUM_SMS
        if split == 1 or (
            full and steps >= 2 * split and -(-m // config.block_m) <= MAX_SPLIT_BLOCKS_M
        ):
            yield split


def candidates(m: int, n: int, k: int) -> list[Config]:
    """What is tried first for a shape."""
    fused = [
        replace(config, split=split)
        for config in tile_configs(m)
        for split in splits(m, n, k, config)
    ]
    return fused + ([DEQUANTIZE] if m >= 128 else [])


def dependent(config: Config) -> list[Config]:
    """`config` with programmatic dependent launch, in three ways."""
    if config.block_m == 0:
        return []
    return [replace(config, pdl=True, prefetch=tiles) for tiles in (0, 4, 8)]


def make_weight(
    n: int, k: int, group: int, symmetric: bool, dtype: torch.dtype, seed: int = 0
) -> PackedWeight:
    """A random weight on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    codes = torch.randint(-8, 8, (n, k), generator=generator, device="cuda", dtype=torch.int8)
    groups = k // group if group else 1
    scale = 0.001 + 0.02 * torch.rand(n, groups, generator=generator, device="cuda")
    zero = None
    if not symmetric:
        zero = torch.randint(
            -8, 8, (n, groups), generator=generator, device="cuda", dtype=torch.int8
        )
    return pack(codes, scale.to(dtype), zero, dtype)


def copy_weight(packed: PackedWeight) -> PackedWeight:
    """Another copy in memory."""
    return replace(
        packed,
        words=packed.words.clone(),
        meta=packed.meta.clone(),
        counters=packed.counters.clone(),
    )


def check(config: Config, group: int, symmetric: bool) -> tuple[Config, str | None]:
    """Compile `config` into Triton's cache and run it on a small weight: what is wrong, or None."""
    from quantforge_kernels import w4a16_triton

    try:
        before = {id(binary) for binary in _binaries()}
        packed = make_weight(256, 1024, group, symmetric, torch.bfloat16)
        x_MK = torch.randn(5, 1024, device="cuda", dtype=torch.bfloat16)
        y_MN = w4a16_triton.multiply(x_MK, packed, None, config)
        expected = x_MK.double() @ w4a16_triton.dequantize(packed).double().T
        error = ((y_MN.double() - expected).norm() / expected.norm()).item()
        spills = max((b.n_spills or 0 for b in _binaries() if id(b) not in before), default=0)
        if spills:
            return config, f"spills {spills} registers"
        return config, None if error < 0.01 else f"relative error {error:.3g}"
    except Exception as error:  # noqa: BLE001 (whatever a config does, the next one is tried)
        return config, f"{type(error).__name__}: {str(error)[-200:]}"


def _binaries() -> list[Any]:
    """What Triton has compiled of the fused kernel in this process."""
    from quantforge_kernels.w4a16_triton import w4a16_kernel

    return [b for caches in w4a16_kernel.device_caches.values() for b in caches[0].values()]


def compile_all(
    configs: Iterable[Config], group: int, symmetric: bool, workers: int, deadline: float
) -> set[Config]:
    """Those of `configs` that compile and are right; the reasons of the others go to stderr."""
    good = set()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = [pool.submit(check, config, group, symmetric) for config in configs]
        try:
            for future in as_completed(futures, timeout=max(1.0, deadline - time.monotonic())):
                config, reason = future.result()
                if reason is None:
                    good.add(config)
                else:
                    say(f"dropped {config}: {reason}")
        except TimeoutError:
            say("time is up: the other configs are not compiled")
            pool.shutdown(wait=False, cancel_futures=True)
        except BrokenProcessPool as error:
            say(f"a worker died, the other configs are not compiled: {error}")
    return good


def launches(
    m: int, weights: list[PackedWeight], config: Config
) -> list[Callable[[], torch.Tensor]]:
    from quantforge_kernels import w4a16_triton

    x_MK = torch.randn(m, weights[0].shape[1], device="cuda", dtype=weights[0].dtype)

    def launch(packed: PackedWeight) -> Callable[[], torch.Tensor]:
        if config.block_m == 0:
            return lambda: torch.nn.functional.linear(x_MK, w4a16_triton.dequantize(packed))
        return lambda: w4a16_triton.multiply(x_MK, packed, None, config)

    return [launch(packed) for packed in weights]


def measure(
    m: int, weights: list[PackedWeight], configs: Iterable[Config], deadline: float, replays: int
) -> list[tuple[float, Config]]:
    """(microseconds, config), fastest first; stops at the deadline."""
    found = []
    for config in configs:
        if time.monotonic() > deadline:
            break
        try:
            found.append((graph_us(launches(m, weights, config), replays), config))
        except Exception as error:  # noqa: BLE001 (as in check)
            say(f"M={m} {weights[0].shape} {config}: {type(error).__name__}: {str(error)[:200]}")
    return sorted(found, key=lambda pair: pair[0])


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def write(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def record(key: tuple[int, int, int, int], found: list[tuple[float, Config]]) -> dict[str, Any]:
    n, k, group, m = key
    return {
        "N": n,
        "K": k,
        "group": group,
        "M": m,
        "us": round(found[0][0], 2),
        "config": asdict(found[0][1]),
        "others": [[round(us, 2), asdict(config)] for us, config in found[1:6]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--shapes", default=",".join(f"{k}x{n}" for k, n in SHAPES), help="KxN,...")
    parser.add_argument("--ms", default=",".join(map(str, TOKENS)))
    parser.add_argument("--group-size", type=int, default=128, help="0 for one scale a channel")
    parser.add_argument("--asymmetric", action="store_true")
    parser.add_argument("--budget-s", type=float, default=400)
    parser.add_argument("--workers", type=int, default=16)
    arguments = parser.parse_args()
    tune(arguments)


def tune(arguments: argparse.Namespace) -> None:
    begin = time.monotonic()
    deadline = begin + arguments.budget_s
    group, symmetric = arguments.group_size, not arguments.asymmetric
    shapes = [tuple(map(int, text.split("x"))) for text in arguments.shapes.split(",")]
    tokens = [int(text) for text in arguments.ms.split(",")]
    pairs = [(k, n, m) for k, n in shapes for m in tokens]
    wanted = {c for k, n, m in pairs for c in candidates(m, n, k) if c.block_m}
    say(f"compiling {len(wanted)} configs")
    good = compile_all(
        sorted(wanted, key=str),
        group,
        symmetric,
        arguments.workers,
        begin + 0.5 * arguments.budget_s,
    )
    good.add(DEQUANTIZE)
    say(f"{len(good)} configs compiled in {time.monotonic() - begin:.0f} s")

    results: dict[tuple[int, int, int, int], list[tuple[float, Config]]] = {}
    document: dict[str, Any] = {"device": torch.cuda.get_device_name(), "records": []}
    if arguments.output.exists():
        document["records"] = json.loads(arguments.output.read_text("utf-8"))["records"]

    def keep(key: tuple[int, int, int, int], found: list[tuple[float, Config]]) -> None:
        results[key] = sorted([*results.get(key, []), *found], key=lambda pair: pair[0])
        rest = [r for r in document["records"] if (r["N"], r["K"], r["group"], r["M"]) != key]
        document["records"] = [*rest, record(key, results[key])]
        write(arguments.output, document)
        say(f"K={key[1]} N={key[0]} M={key[3]}: {results[key][0][0]:.2f} us {results[key][0][1]}")

    first_phase = begin + 0.8 * arguments.budget_s
    for done, (k, n) in enumerate(shapes):
        weights = rotating(n, k, group, symmetric)
        left = (first_phase - time.monotonic()) / (len(shapes) - done)
        for i, m in enumerate(tokens):
            share = left * (i + 1) / len(tokens) - left * i / len(tokens)
            tried = [c for c in candidates(m, n, k) if c in good]
            random.Random(0).shuffle(tried)  # where time runs out, the rest is left to chance
            found = measure(m, weights, tried, time.monotonic() + share, 3)
            if found:
                keep((n, k, group, m), found)
        del weights
    best = {key: [c for _, c in found[:3]] for key, found in results.items()}
    second = {d for configs in best.values() for c in configs for d in dependent(c)}
    say(f"compiling {len(second)} configs with dependent launch")
    good = compile_all(sorted(second, key=str), group, symmetric, arguments.workers, deadline - 20)
    for k, n in shapes:
        weights = rotating(n, k, group, symmetric)
        for m in tokens:
            configs = best.get((n, k, group, m), [])
            tried = configs[:2] + [d for c in configs for d in dependent(c) if d in good]
            found = measure(m, weights, tried, deadline, 10)
            if found:
                results.pop((n, k, group, m))
                keep((n, k, group, m), found)
        del weights
    say(f"done in {time.monotonic() - begin:.0f} s")


def rotating(n: int, k: int, group: int, symmetric: bool) -> list[PackedWeight]:
    """Copies of one random weight, together larger than the cache."""
    weight = make_weight(n, k, group, symmetric, torch.bfloat16)
    copies = copies_to_be_cold(n * k // 2)
    return [weight, *(copy_weight(weight) for _ in range(copies - 1))]


if __name__ == "__main__":
    main()
