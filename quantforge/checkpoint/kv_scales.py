"""Calibrated scales of the KV cache: where they lie in a checkpoint, in compressed-tensors' words.

config.json says ``kv_cache_scheme`` (8 bits, float = E4M3 or int, one scale a layer), and each
layer has, in float32 [1]::

    model.layers.<i>.self_attn.k_scale    of the keys after their rotation
    model.layers.<i>.self_attn.v_scale    of the values

Both multiply on reading: a cache holds ``key / k_scale``. vLLM finds them under these names.
"""

from collections.abc import Iterator

from quantforge.checkpoint._compressed import holds_kv_cache, with_kv_cache
from quantforge.checkpoint.reader import CheckpointReader
from quantforge.errors import CheckpointError

__all__ = [
    "KV_SCALE_BYTES",
    "SUFFIXES",
    "holds_kv_cache",
    "is_kv_scale",
    "kv_scale_problems",
    "read_kv_scale",
    "with_kv_cache",
]

SUFFIXES = ("self_attn.k_scale", "self_attn.v_scale")
"""Names of the two scales within a block."""

KV_SCALE_BYTES = 4 * len(SUFFIXES)
"""What one layer's scales take on disk."""


def is_kv_scale(name: str) -> bool:
    """Whether `name` is that of a scale of a KV cache."""
    return name.endswith(tuple(f".{suffix}" for suffix in SUFFIXES))


def read_kv_scale(reader: CheckpointReader, name: str) -> float:
    """The scale `name`. Raises `CheckpointError` unless it is one finite number above 0."""
    if name not in reader:
        raise CheckpointError(
            f"{reader.folder}: tensor {name} is missing, but kv_cache_scheme of config.json "
            "says that the KV cache has calibrated scales"
        )
    spec = reader.spec(name)
    if spec.shape not in ((), (1,)) or not spec.dtype.is_floating_point:
        raise CheckpointError(
            f"{reader.folder}: tensor {name} is {spec.dtype} {list(spec.shape)}; "
            "expected one floating-point number, [1]"
        )
    value = float(reader.tensor(name))
    if not 0 < value < float("inf"):
        raise CheckpointError(
            f"{reader.folder}: {name} is {value}; expected a finite number above 0"
        )
    return value


def kv_scale_problems(reader: CheckpointReader, blocks: tuple[str, ...]) -> Iterator[str]:
    """What is wrong with the scales: of `blocks` (``model.layers.0``), or left over."""
    expected: set[str] = set()
    if reader.layout is not None and reader.layout.kv_cache is not None:
        expected = {f"{block}.{suffix}" for block in blocks for suffix in SUFFIXES}
    values: list[float] = []
    for name in sorted(expected):
        try:
            values.append(read_kv_scale(reader, name))
        except CheckpointError as error:
            yield str(error)
    if values and all(value == 1 for value in values):
        yield "every scale of the KV cache is 1.0: they were never calibrated"
    for name in reader.names():
        if is_kv_scale(name) and name not in expected:
            yield f"{name} is there, but config.json has no kv_cache_scheme for it"
