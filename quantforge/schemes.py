"""What a weight or an activation is rounded to: `TensorQuant`, `QuantScheme` and the presets.

``str()`` gives the short name that tables and reports use::

    int4-g128-asym      4-bit integers, one scale and zero point a group of 128 inputs
    int8-channel-sym    8-bit integers, one scale an output channel
    fp8-token-dynamic   E4M3, one scale a token computed at run time
    fp4-g16-e4m3        NVFP4: E2M1, an E4M3 scale for 16 inputs under one float32 scale
    fp4-g32-e8m0        MXFP4: E2M1, a power of two for 32 inputs

Impossible combinations are refused here and nowhere else. Standard library only.
"""

from dataclasses import dataclass, replace
from typing import Literal

from quantforge.errors import RecipeError
from quantforge.registry import did_you_mean

DType = Literal["int", "float"]
Granularity = Literal["tensor", "channel", "group", "block", "token"]
ScaleFormat = Literal["e4m3", "e8m0"]

INT_BITS = (2, 3, 4, 8)
FLOAT_BITS = (4, 8)
FP4_GROUPS = {"e4m3": 16, "e8m0": 32}
"""Group sizes of NVFP4 and MXFP4, by the format of their scales."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorQuant:
    """How one tensor is quantized.

    `num_bits` and `dtype` name the code (int 2 to 8, float 8 = E4M3, float 4 = E2M1);
    `granularity` says what shares a scale, with `group_size` inputs for ``group`` and
    `block_shape` (rows, columns) for ``block``; `dynamic` scales are computed at run time.
    `scale_format` is None where scales are stored in the model's dtype; E2M1 has ``e4m3`` scales
    under one float32 scale of the tensor (NVFP4), or ``e8m0``, powers of two (MXFP4).
    Raises `RecipeError` when impossible.
    """

    num_bits: int
    dtype: DType = "int"
    symmetric: bool = True
    granularity: Granularity = "channel"
    group_size: int | None = None
    block_shape: tuple[int, int] | None = None
    dynamic: bool = False
    scale_format: ScaleFormat | None = None

    def __post_init__(self) -> None:
        allowed = INT_BITS if self.dtype == "int" else FLOAT_BITS
        if self.dtype not in ("int", "float"):
            raise RecipeError(f"dtype {self.dtype!r} is not one of int, float")
        if self.num_bits not in allowed:
            raise RecipeError(f"num_bits {self.num_bits} is not one of {allowed} for {self.dtype}")
        if self.granularity not in ("tensor", "channel", "group", "block", "token"):
            raise RecipeError(
                f"granularity {self.granularity!r} is not one of "
                "tensor, channel, group, block, token"
            )
        if (self.granularity == "group") != (self.group_size is not None):
            raise RecipeError(
                f"group_size {self.group_size} with granularity {self.granularity}: "
                "a group size belongs to granularity 'group', and only to it"
            )
        if self.group_size is not None and self.group_size < 1:
            raise RecipeError(f"group_size {self.group_size} must be at least 1")
        if (self.granularity == "block") != (self.block_shape is not None):
            raise RecipeError(
                f"block_shape {self.block_shape} with granularity {self.granularity}: "
                "a block shape belongs to granularity 'block', and only to it"
            )
        if self.dtype == "float" and not self.symmetric:
            raise RecipeError("float codes are symmetric; use dtype int for a zero point")
        self._check_scale_format()

    def _check_scale_format(self) -> None:
        if self.scale_format is None:
            return
        if self.scale_format not in FP4_GROUPS:
            raise RecipeError(
                f"scale_format {self.scale_format!r} is not one of {', '.join(FP4_GROUPS)}"
            )
        size = FP4_GROUPS[self.scale_format]
        if self.code_type != "float4" or self.group_size != size:
            raise RecipeError(
                f"scale_format {self.scale_format} belongs to float codes of 4 bits in groups of "
                f"{size}, not to {self.dtype} of {self.num_bits} bits with group_size "
                f"{self.group_size}"
            )

    def __str__(self) -> str:
        code = f"int{self.num_bits}" if self.dtype == "int" else f"fp{self.num_bits}"
        shared = self.granularity if self.group_size is None else f"g{self.group_size}"
        if self.block_shape is not None:
            shared = f"block{self.block_shape[0]}x{self.block_shape[1]}"
        parts = [code, shared]
        if self.dtype == "int":
            parts.append("sym" if self.symmetric else "asym")
        if self.scale_format is not None:
            parts.append(self.scale_format)
        if self.dynamic:
            parts.append("dynamic")
        return "-".join(parts)

    @property
    def code_type(self) -> str:
        """What a code is: ``int``, ``float8`` (E4M3) or ``float4`` (E2M1)."""
        return self.dtype if self.dtype == "int" else f"{self.dtype}{self.num_bits}"

    @property
    def code_range(self) -> tuple[int, int]:
        """Smallest and largest integer code, signed: (-8, 7) for 4 bits."""
        half = 1 << (self.num_bits - 1)
        return -half, half - 1

    def num_groups(self, in_features: int) -> int:
        """Scales along the input dimension of a weight with `in_features` inputs."""
        return 1 if self.group_size is None else -(-in_features // self.group_size)

    def refuse_shape(self, shape: tuple[int, int]) -> str | None:
        """Why a weight of `shape` [out_features, in_features] cannot have this scheme, or None."""
        if self.scale_format is not None and shape[1] % FP4_GROUPS[self.scale_format]:
            return (
                f"group_size {self.group_size} of {self} does not divide in_features {shape[1]}; "
                "ignore such layers, or use another scheme"
            )
        if self.group_size is not None and shape[1] % self.group_size:
            fitting = [g for g in (128, 64, 32, 16) if shape[1] % g == 0]
            advice = (
                f"use a divisor such as {' or '.join(map(str, fitting))}"
                if fitting
                else ("use channel granularity")
            )
            return f"group_size {self.group_size} does not divide in_features {shape[1]}; {advice}"
        return None

    def refuse_input(self, in_features: int) -> str | None:
        """Why inputs of `in_features` values cannot be quantized so at run time, or None."""
        if self.group_size is not None and in_features % self.group_size:
            return (
                f"one activation scale for {self.group_size} inputs does not divide in_features "
                f"{in_features}; use a scheme with one scale a token, such as fp8_dynamic"
            )
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantScheme:
    """How a linear layer is quantized: its weight, and its input where that is quantized too."""

    weight: TensorQuant
    activation: TensorQuant | None = None

    def __str__(self) -> str:
        return str(self.weight) if self.activation is None else f"{self.weight}+{self.activation}"

    @property
    def has_static_inputs(self) -> bool:
        """Whether inputs are rounded under a scale that calibration measured."""
        return self.activation is not None and not self.activation.dynamic

    def refuse_shape(self, shape: tuple[int, int]) -> str | None:
        """Why a linear of `shape` [out_features, in_features] cannot have this scheme, or None."""
        reason = self.weight.refuse_shape(shape)
        if reason is None and self.activation is not None:
            return self.activation.refuse_input(shape[1])
        return reason


def _int_weights(num_bits: int, *, symmetric: bool) -> QuantScheme:
    return QuantScheme(
        weight=TensorQuant(
            num_bits=num_bits, symmetric=symmetric, granularity="group", group_size=128
        )
    )


def _fp4_weights(scale_format: ScaleFormat) -> QuantScheme:
    return QuantScheme(
        weight=TensorQuant(
            num_bits=4,
            dtype="float",
            granularity="group",
            group_size=FP4_GROUPS[scale_format],
            scale_format=scale_format,
        )
    )


PRESETS: dict[str, QuantScheme] = {
    "w4a16": _int_weights(4, symmetric=False),
    "w4a16_sym": _int_weights(4, symmetric=True),
    "w3a16": _int_weights(3, symmetric=False),
    "w2a16": _int_weights(2, symmetric=False),
    "w8a16": QuantScheme(weight=TensorQuant(num_bits=8, granularity="channel")),
    "fp8_dynamic": QuantScheme(
        weight=TensorQuant(num_bits=8, dtype="float", granularity="channel"),
        activation=TensorQuant(num_bits=8, dtype="float", granularity="token", dynamic=True),
    ),
    "fp8_block": QuantScheme(
        weight=TensorQuant(num_bits=8, dtype="float", granularity="block", block_shape=(128, 128)),
        activation=TensorQuant(
            num_bits=8, dtype="float", granularity="group", group_size=128, dynamic=True
        ),
    ),
    "fp8_static": QuantScheme(
        weight=TensorQuant(num_bits=8, dtype="float", granularity="tensor"),
        activation=TensorQuant(num_bits=8, dtype="float", granularity="tensor"),
    ),
    "w8a8_int8": QuantScheme(
        weight=TensorQuant(num_bits=8, granularity="channel"),
        activation=TensorQuant(num_bits=8, granularity="token", dynamic=True),
    ),
    "w8a8_int8_static": QuantScheme(
        weight=TensorQuant(num_bits=8, granularity="channel"),
        activation=TensorQuant(num_bits=8, granularity="tensor"),
    ),
    "nvfp4a16": _fp4_weights("e4m3"),
    "mxfp4a16": _fp4_weights("e8m0"),
}
"""Schemes by name. ``w4a16`` has zero points: at four bits they cost 1 % of size and win quality
(llm-compressor's W4A16 is our ``w4a16_sym``)."""


def preset(name: str) -> QuantScheme:
    """The preset called `name`; raises `RecipeError` with the known and the nearest names."""
    key = name.lower().replace("-", "_")
    if key not in PRESETS:
        raise RecipeError(
            f"unknown scheme {name!r}{did_you_mean(key, PRESETS)}; known: {', '.join(PRESETS)}"
        )
    return PRESETS[key]


KV_CACHES: dict[str, TensorQuant | None] = {
    "none": None,
    "fp8": TensorQuant(num_bits=8, dtype="float", granularity="tensor"),
    "int8": TensorQuant(num_bits=8, granularity="tensor"),
}
"""What a checkpoint may hold calibrated KV-cache scales for: E4M3 or int8, by recipe key."""


def kv_cache_quant(name: str) -> TensorQuant | None:
    """The KV cache's quantization called `name`, None for ``none``. Raises `RecipeError`."""
    if name in ("fp8_e5m2", "e5m2"):
        raise RecipeError(
            f"kv_cache {name!r}: E5M2 needs no calibrated scale, so nothing is written for it; "
            "leave kv_cache at none and serve with --kv-cache-dtype fp8_e5m2"
        )
    if name not in KV_CACHES:
        raise RecipeError(
            f"unknown kv_cache {name!r}{did_you_mean(name, KV_CACHES)}; "
            f"known: {', '.join(KV_CACHES)}"
        )
    return KV_CACHES[name]


def with_group_size(scheme: QuantScheme, group_size: int | None) -> QuantScheme:
    """`scheme` with another weight group size; None means one scale a channel."""
    granularity: Granularity = "channel" if group_size is None else "group"
    weight = replace(scheme.weight, granularity=granularity, group_size=group_size)
    return replace(scheme, weight=weight)
