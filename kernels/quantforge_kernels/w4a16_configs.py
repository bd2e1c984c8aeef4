"""How `w4a16` cuts a product for a GPU: measured choices as data, a rule for what is not measured.

``tuned/w4a16-*.json`` holds the fastest `Config` by device name, shape [N, K], group size and M, as
``python -m quantforge_kernels.w4a16_tune`` found them. An M between two that were measured takes
the larger's.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

TABLES = Path(__file__).parent / "tuned"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Tile sizes of the fused kernel; with `block_m` 0 the weight is dequantized for cuBLAS.

    `tiles` of 128 columns a step; `split` parts of K; `pdl` starts before the previous kernel ends
    (programmatic dependent launch) and `prefetch` that many tiles into L2 in the meantime.
    """

    block_m: int
    block_n: int = 64
    tiles: int = 1
    split: int = 1
    num_warps: int = 4
    num_stages: int = 3
    pdl: bool = False
    prefetch: int = 0


DEQUANTIZE = Config(block_m=0)

SMALLEST_DEQUANTIZED_M = 513
"""From here on the rule dequantizes: writing and reading the weight costs little beside cuBLAS."""


def choose(
    m: int, shape: tuple[int, int], group: int, device_name: str, num_sms: int, capability: int
) -> Config:
    """The measured config for `m` tokens, or the rule's."""
    measured = _table(device_name).get((*shape, group), {})
    sizes = [size for size in measured if size >= m]
    return measured[min(sizes)] if sizes else by_rule(m, shape, num_sms, capability)


def by_rule(m: int, shape: tuple[int, int], num_sms: int, capability: int) -> Config:
    """A config from sizes alone; measured on an H200, a guess elsewhere."""
    if m >= SMALLEST_DEQUANTIZED_M:
        return DEQUANTIZE
    n, k = shape
    block_m = next((size for size in (16, 32, 64) if m <= size), 128)
    wide = block_m == 128
    block_n = 128 if wide else 64
    blocks = -(-n // block_n) * -(-m // block_m)
    resident = {16: 4, 32: 3, 64: 2}.get(block_m, 1) * num_sms
    steps = -(-k // 256)
    split = max(1, min(resident // blocks, steps // 2, 8)) if m <= 512 else 1
    return Config(
        block_m=block_m,
        block_n=block_n,
        tiles=1 if wide else 2,
        split=split,
        num_warps=8 if wide else 4,
        num_stages=2 if capability < 90 else 3,
    )


@lru_cache
def _table(device_name: str) -> dict[tuple[int, int, int], dict[int, Config]]:
    """{(N, K, group): {M: config}} for a device, empty where nothing was measured."""
    file = TABLES / f"w4a16-{device_name.lower().replace(' ', '-')}.json"
    if not file.exists():
        return {}
    return read_table(json.loads(file.read_text(encoding="utf-8")))


def read_table(document: dict[str, Any]) -> dict[tuple[int, int, int], dict[int, Config]]:
    """{(N, K, group): {M: config}} of a tuning result's records."""
    table: dict[tuple[int, int, int], dict[int, Config]] = {}
    for record in document["records"]:
        key = (record["N"], record["K"], record["group"])
        table.setdefault(key, {})[record["M"]] = Config(**record["config"])
    return table
