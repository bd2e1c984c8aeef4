"""``gptq``: the layout of AutoGPTQ and GPTQModel, whose second version is ``gptq_v2``.

A layer ``L`` of shape [N, K] with b-bit codes (P = 32 / b a word) and G groups has the tensors::

    L.qweight  int32 [K / P, N]    packed along K, in plain order: 0 .. 7 -> 0x76543210
    L.qzeros   int32 [G, N / P]    zero points, packed along N
    L.scales   float16 [G, N]
    L.g_idx    int32 [K]           the group of each input

Version 1 stores each *word* of zero points less ``0x11111111`` (for 4 bits), so a zero of 0 borrows
from its neighbour. Readers differ on such words; none is written: a group with a zero of 0 gets 1
and codes one higher, which is exact unless a code was at the top already.

With activation order (``desc_act``) `g_idx` is any assignment of inputs to groups. The columns are
then sorted by group, and `QuantizedTensor.permutation` says where they came from.

Legend: N out features, K in features, G groups of K.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import quantforge
from quantforge.checkpoint._stored import (
    check_matrix,
    check_pattern,
    check_spec,
    half_scale,
    parse_quant,
    take,
    take_scale,
)
from quantforge.checkpoint._words import WORD_BITS, add_to_words, pack_words, unpack_words
from quantforge.checkpoint.base import QuantizationLayout, SchemeGroup, TensorSpec
from quantforge.errors import CheckpointError, UnsupportedError
from quantforge.qtensor import QuantizedTensor
from quantforge.schemes import QuantScheme, TensorQuant

WIDTHS = (2, 4, 8)
HEAD = "lm_head"
WHERE = "quantization_config"


class Gptq:
    """The `Format` of this file, and with `zero_offset` 0 of ``gptq_v2``."""

    scale_suffix = "scales"
    suffixes = frozenset({"qweight", "qzeros", "scales", "g_idx"})

    def __init__(self, name: str, zero_offset: int) -> None:
        self.name = name
        self.zero_offset = zero_offset

    def matches(self, scheme: QuantScheme) -> bool:
        weight = scheme.weight
        return (
            scheme.activation is None
            and weight.dtype == "int"
            and weight.num_bits in WIDTHS
            and weight.granularity in ("channel", "group")
            and not weight.dynamic
        )

    def matches_config(self, quantization_config: Mapping[str, Any]) -> bool:
        if quantization_config.get("quant_method") != "gptq":
            return False
        if quantization_config.get("is_marlin_format"):
            return False
        kind = quantization_config.get("checkpoint_format") or quantization_config.get("format")
        return (kind or "gptq") == self.name

    def refuse(self, layer: str, shape: tuple[int, int], scheme: QuantScheme) -> str | None:
        per_word = WORD_BITS // scheme.weight.num_bits
        for name, size in zip(("out_features", "in_features"), shape, strict=True):
            if size % per_word:
                return f"{name} {size} of {layer or 'a layer'} is not a multiple of {per_word}"
        return scheme.weight.refuse_shape(shape)

    def tensors(
        self, shape: tuple[int, int], scheme: QuantScheme, scale_dtype: torch.dtype
    ) -> dict[str, TensorSpec]:
        rows, columns = shape
        per_word = WORD_BITS // scheme.weight.num_bits
        groups = scheme.weight.num_groups(columns)
        return {
            "qweight": TensorSpec(shape=(-(-columns // per_word), rows), dtype=torch.int32),
            "qzeros": TensorSpec(shape=(groups, -(-rows // per_word)), dtype=torch.int32),
            "scales": TensorSpec(shape=(groups, rows), dtype=scale_dtype),
            "g_idx": TensorSpec(shape=(columns,), dtype=torch.int32),
        }

    def layer_shape(self, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        qweight, g_idx = take(tensors, "qweight"), take(tensors, "g_idx")
        check_matrix("qweight", qweight)
        if g_idx.dim() != 1 or g_idx.dtype != torch.int32 or not g_idx.numel():
            raise CheckpointError(
                f"g_idx is {g_idx.dtype} {list(g_idx.shape)}; expected int32 with one entry an "
                "input"
            )
        return qweight.shape[1], g_idx.shape[0]

    def encode(self, qtensor: QuantizedTensor) -> dict[str, Tensor]:
        quant = qtensor.quant
        scheme = QuantScheme(weight=quant)
        if not self.matches(scheme) or qtensor.permutation is not None:
            order = " in activation order" if qtensor.permutation is not None else ""
            raise UnsupportedError(f"format {self.name} cannot hold weight scheme {scheme}{order}")
        if (reason := self.refuse("", qtensor.shape, scheme)) is not None:
            raise UnsupportedError(f"format {self.name}: {reason}")
        codes, zero_point = qtensor.codes, qtensor.zero_point
        if zero_point is None:
            zero_point = torch.zeros_like(qtensor.scale, dtype=torch.int8)
        elif self.zero_offset:
            codes, zero_point = _without_zero_zeros(codes, zero_point, quant)
        qzeros = pack_words(zero_point.T, quant.num_bits)
        columns = qtensor.shape[1]
        size = quant.group_size or columns
        return {
            "qweight": pack_words(codes, quant.num_bits).T.contiguous(),
            "qzeros": add_to_words(qzeros, -self.zero_offset * _ones(quant)),
            "scales": half_scale(qtensor.scale).T.contiguous(),
            "g_idx": (torch.arange(columns) // size).to(torch.int32),
        }

    def decode(self, tensors: Mapping[str, Tensor], scheme: QuantScheme) -> QuantizedTensor:
        quant = scheme.weight
        shape = self.layer_shape(tensors)
        if (reason := self.refuse("", shape, scheme)) is not None:
            raise CheckpointError(f"qweight: {reason}")
        scale = take_scale(tensors, self.scale_suffix)
        for suffix, spec in self.tensors(shape, scheme, scale.dtype).items():
            check_spec(suffix, take(tensors, suffix), spec, scheme)
        qzeros = add_to_words(tensors["qzeros"], self.zero_offset * _ones(quant))
        zero_NG = unpack_words(qzeros, quant.num_bits).T.contiguous()
        if quant.symmetric and bool(zero_NG.any()):
            middle = 1 << (quant.num_bits - 1)
            raise CheckpointError(
                f"qzeros hold {int(zero_NG.min()) + middle} .. {int(zero_NG.max()) + middle} as "
                f"{self.name} stores them; with sym true all are {middle} (is checkpoint_format "
                "right?)"
            )
        codes = unpack_words(tensors["qweight"].T.contiguous(), quant.num_bits)
        permutation = _permutation(tensors["g_idx"], quant)
        return QuantizedTensor(
            codes=codes if permutation is None else codes[:, permutation].contiguous(),
            scale=scale.T.contiguous(),
            zero_point=None if quant.symmetric else zero_NG,
            quant=quant,
            permutation=permutation,
        )

    def quantization_config(
        self, groups: Sequence[SchemeGroup], ignore: Sequence[str]
    ) -> dict[str, Any]:
        """The first group is the rule; others, and what is ignored, become ``dynamic`` entries."""
        for group in groups:
            if not self.matches(group.scheme):
                raise UnsupportedError(f"format {self.name} cannot hold scheme {group.scheme}")
        dynamic: dict[str, Any] = {f"-:{_exactly(n)}": {} for n in ignore if n != HEAD}
        for group in groups[1:]:
            entry = _config_numbers(group.scheme.weight)
            dynamic |= {f"+:{_exactly(name)}": entry for name in group.targets}
        return {
            "quant_method": "gptq",
            **_config_numbers(groups[0].scheme.weight),
            "desc_act": False,
            "lm_head": HEAD not in ignore,
            "checkpoint_format": self.name,
            "pack_dtype": "int32",
            "meta": {"quantizer": [f"quantforge:{quantforge.__version__}"]},
            **({"dynamic": dynamic} if dynamic else {}),
        }

    def parse_config(self, quantization_config: Mapping[str, Any]) -> QuantizationLayout:
        if (pack := quantization_config.get("pack_dtype", "int32")) != "int32":
            raise UnsupportedError(f"{WHERE}: pack_dtype {pack!r} is not supported; only int32 is")
        ignore = [] if quantization_config.get("lm_head") else [HEAD]
        groups = [_parse_group(WHERE, quantization_config, {}, _targets(quantization_config))]
        dynamic = quantization_config.get("dynamic") or {}
        if not isinstance(dynamic, Mapping):
            raise CheckpointError(f"{WHERE}: dynamic is {dynamic!r}; expected a mapping")
        for key, entry in dynamic.items():
            where = f"{WHERE}: dynamic {key!r}"
            pattern = "re:" + check_pattern(where, key.removeprefix("-:").removeprefix("+:"))
            if key.startswith("-:"):
                ignore.append(pattern)
            elif isinstance(entry, Mapping):
                groups.append(_parse_group(where, quantization_config, entry, (pattern,)))
            else:
                raise CheckpointError(f"{where} is {entry!r}; expected a mapping")
        return QuantizationLayout(format=self.name, groups=tuple(groups), ignore=tuple(ignore))


FORMAT = Gptq("gptq", zero_offset=1)


def _ones(quant: TensorQuant) -> int:
    """A word with 1 in each of its fields: 0x11111111 for 4 bits."""
    return sum(1 << shift for shift in range(0, WORD_BITS, quant.num_bits))


def _without_zero_zeros(
    codes_NK: Tensor, zero_NG: Tensor, quant: TensorQuant
) -> tuple[Tensor, Tensor]:
    """Codes and zero points one higher in the groups whose (unsigned) zero point is 0.

    Codes already at the top stay there: those weights lose one step.
    """
    low, high = quant.code_range
    grouped = codes_NK.reshape(*zero_NG.shape, -1)
    raised = (zero_NG == low).unsqueeze(-1) & (grouped < high)
    return (grouped + raised).reshape(codes_NK.shape), zero_NG.clamp(min=low + 1)


def _permutation(g_idx_K: Tensor, quant: TensorQuant) -> Tensor | None:
    """int64 [K], where each column lies once columns are sorted by group; None: as they are."""
    columns = g_idx_K.shape[0]
    groups = quant.num_groups(columns)
    if int(g_idx_K.min()) < 0 or int(g_idx_K.max()) >= groups:
        raise CheckpointError(
            f"g_idx spans {int(g_idx_K.min())} .. {int(g_idx_K.max())}; "
            f"allowed are 0 .. {groups - 1}"
        )
    size = columns // groups
    counts = torch.bincount(g_idx_K.long(), minlength=groups)
    if bool((counts != size).any()):
        group = int((counts != size).nonzero()[0])
        raise CheckpointError(
            f"g_idx gives {int(counts[group])} inputs to group {group}; each has {size}"
        )
    permutation = torch.argsort(g_idx_K.long(), stable=True)
    return None if torch.equal(permutation, torch.arange(columns)) else permutation


def _config_numbers(quant: TensorQuant) -> dict[str, Any]:
    size = -1 if quant.group_size is None else quant.group_size
    return {"bits": quant.num_bits, "group_size": size, "sym": quant.symmetric}


def _exactly(name: str) -> str:
    return f"^{re.escape(name)}$"


def _targets(section: Mapping[str, Any]) -> tuple[str, ...]:
    """All linears, or those that ``modules_in_block_to_quantize`` (lists of names) lists."""
    listed = section.get("modules_in_block_to_quantize")
    if not listed:
        return ("Linear",)
    rows = listed if isinstance(listed, list) else [listed]
    names = [name for row in rows for name in (row if isinstance(row, list) else [row])]
    if not all(isinstance(name, str) and name for name in names):
        raise CheckpointError(
            f"{WHERE}: modules_in_block_to_quantize is {listed!r}; expected lists of names"
        )
    return tuple(rf"re:.*\.{re.escape(name)}$" for name in names)


def _parse_group(
    where: str, section: Mapping[str, Any], entry: Mapping[str, Any], targets: tuple[str, ...]
) -> SchemeGroup:
    """The scheme of `section` with what `entry` says otherwise."""
    numbers = {key: entry.get(key, section.get(key)) for key in ("bits", "group_size")}
    symmetric = entry.get("sym", section.get("sym", True))
    quant = parse_quant(where, numbers, symmetric=symmetric, widths=WIDTHS)
    return SchemeGroup(targets=targets, scheme=QuantScheme(weight=quant))
