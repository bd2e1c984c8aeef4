"""Cuts weights for one rank of several, and joins projections that share an input.

A rank owns whole heads and a slice of the MLP: q, k, v, gate and up are cut by rows (outputs), o
and down by columns (inputs), so that the ranks' outputs of o and down sum to the whole. A cut must
not divide a quantization group or block. Inputs with one dynamic scale a token are the exception to
the exact sum: each rank takes the scale over the inputs that it has.

Legend: N out features, K in features, G groups of K.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantforge.errors import UnsupportedError, UsageError
from quantforge.models.config import ModelConfig
from quantforge.qtensor import QuantizedTensor
from quantforge.schemes import QuantScheme

ROW_PARALLEL = frozenset(
    {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"}
)
COLUMN_PARALLEL = frozenset({"self_attn.o_proj", "mlp.down_proj"})

Weight = Tensor | QuantizedTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """Rank `rank` of `world`; raises `UsageError` unless ``0 <= rank < world``."""

    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise UsageError(f"rank {self.rank} is not in 0..{self.world - 1} (world {self.world})")

    def local(self, config: ModelConfig) -> ModelConfig:
        """`config` with this rank's heads and MLP size. Raises `UnsupportedError` if uneven."""
        sizes = {
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "intermediate_size": config.intermediate_size,
        }
        for name, size in sizes.items():
            if size % self.world:
                raise UnsupportedError(f"{name} {size} is not divisible by {self.world} ranks")
        return replace(
            config,
            num_heads=config.num_heads // self.world,
            num_kv_heads=config.num_kv_heads // self.world,
            intermediate_size=config.intermediate_size // self.world,
        )

    def refuse_scheme(self, name: str, shape: tuple[int, int], scheme: QuantScheme) -> str | None:
        """Why linear `name` of a block, [out_features, in_features], cannot be cut, or None."""
        if self.world == 1:
            return None
        block = scheme.weight.block_shape
        if name in ROW_PARALLEL:
            tall = None if block is None else block[0]
            return self._refuse_share("outputs", shape[0], {"block rows": tall})
        if name not in COLUMN_PARALLEL:
            return None
        activation = scheme.activation
        sizes = {
            "group_size": scheme.weight.group_size,
            "block columns": None if block is None else block[1],
            "the activations' group_size": None if activation is None else activation.group_size,
        }
        return self._refuse_share("inputs", shape[1], sizes)

    def _refuse_share(self, what: str, whole: int, sizes: Mapping[str, int | None]) -> str | None:
        share = whole // self.world
        for kind, size in sizes.items():
            if size is not None and share % size:
                return (
                    f"{self.world} ranks cut its {whole} {what} into {share}, which "
                    f"{kind} {size} does not divide"
                )
        return None

    def cut(self, name: str, weight: Weight) -> Weight:
        """This rank's part of the weight [N, K] of linear `name` of a block."""
        if self.world == 1:
            return weight
        if name in ROW_PARALLEL:
            return rows(weight, self.rank, self.world)
        return columns(weight, self.rank, self.world) if name in COLUMN_PARALLEL else weight

    def cut_bias(self, name: str, bias_N: Tensor | None) -> Tensor | None:
        """This rank's part of a bias; that of a column-cut linear belongs to rank 0 alone."""
        if self.world == 1 or bias_N is None:
            return bias_N
        if name in ROW_PARALLEL:
            return bias_N.chunk(self.world)[self.rank]
        return None if name in COLUMN_PARALLEL and self.rank else bias_N


def rows(weight: Weight, part: int, parts: int) -> Weight:
    """Part `part` of `parts` equal runs of output channels."""
    if isinstance(weight, Tensor):
        return weight.chunk(parts)[part]
    return _cut_fields(weight, 0, part, parts)


def columns(weight: Weight, part: int, parts: int) -> Weight:
    """Part `part` of `parts` equal runs of inputs, with their groups' or blocks' scales."""
    if isinstance(weight, Tensor):
        return weight.chunk(parts, dim=1)[part]
    return _cut_fields(weight, 1, part, parts)


def joinable(weights: Sequence[Weight]) -> bool:
    """Whether `join` of these is exact: all dense, or all of one scheme.

    Blocks join only where every weight but the last ends with a whole block; static input scales
    must be equal, and so must global scales. Weights with one scale each always join: see `join`.
    """
    if all(isinstance(w, Tensor) for w in weights):
        return True
    quants = {w.quant if isinstance(w, QuantizedTensor) else None for w in weights}
    if len(quants) != 1 or not all(_is_plain(w) for w in weights):
        return False
    quant = quants.pop()
    if quant is None or quant.granularity not in ("tensor", "channel", "group", "block"):
        return False
    if not _have_same_input_scale(weights):
        return False
    if not _same_global_scale(weights):
        return False
    tall = 1 if quant.block_shape is None else quant.block_shape[0]
    return all(w.shape[0] % tall == 0 for w in weights[:-1])


def join(weights: Sequence[Weight]) -> Weight:
    """One weight whose output channels are those of `weights` in order; see `joinable`.

    One scale a tensor stays one where all parts have the same, else each part's is repeated for
    its channels: the same products, under channel granularity.
    """
    dense = [w for w in weights if isinstance(w, Tensor)]
    if len(dense) == len(weights):
        return torch.cat(dense)
    parts = [w for w in weights if isinstance(w, QuantizedTensor)]
    zero_points = [p.zero_point for p in parts if p.zero_point is not None]
    quant = parts[0].quant
    if quant.granularity != "tensor":
        scale = torch.cat([p.scale for p in parts])
    elif all(torch.equal(p.scale, parts[0].scale) for p in parts):
        scale = parts[0].scale
    else:
        scale = torch.cat([p.scale.expand(p.shape[0], 1) for p in parts])
        quant = replace(quant, granularity="channel")
    return QuantizedTensor(
        codes=torch.cat([p.codes for p in parts]),
        scale=scale,
        zero_point=torch.cat(zero_points) if zero_points else None,
        quant=quant,
        input_scale=parts[0].input_scale,
        global_scale=parts[0].global_scale,
    )


def join_biases(biases: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    """One bias for a joined linear; parts of `sizes` outputs without one get zeros."""
    present = [b for b in biases if b is not None]
    if not present:
        return None
    parts = zip(biases, sizes, strict=True)
    return torch.cat([present[0].new_zeros(n) if b is None else b for b, n in parts])


def _have_same_input_scale(weights: Sequence[Weight]) -> bool:
    scales = [w.input_scale for w in weights if isinstance(w, QuantizedTensor)]
    given = [scale for scale in scales if scale is not None]
    if not given:
        return True
    return len(given) == len(weights) and all(torch.equal(s, given[0]) for s in given)


def _is_plain(weight: Weight) -> bool:
    """Whether a weight is a quantized one with codes, scales and zero points, and a global scale
    at most.

    A static scale of the inputs, which all channels share, may be there.
    """
    return (
        isinstance(weight, QuantizedTensor)
        and weight.permutation is None
        and weight.codebook is None
    )


def _same_global_scale(weights: Sequence[Weight]) -> bool:
    found = [w.global_scale for w in weights if isinstance(w, QuantizedTensor)]
    present = [scale for scale in found if scale is not None]
    if not present:
        return True
    return len(present) == len(found) and all(torch.equal(present[0], s) for s in present)


def _cut_fields(qtensor: QuantizedTensor, dim: int, part: int, parts: int) -> QuantizedTensor:
    """Cuts codes and scales along `dim`; a scale that all of `dim` shares stays whole."""
    if not _is_plain(qtensor):
        raise UnsupportedError(f"weights of scheme {qtensor.quant} cannot be cut for several ranks")

    def cut(t: Tensor) -> Tensor:
        return t if t.shape[dim] == 1 else t.chunk(parts, dim)[part]

    zero_point = qtensor.zero_point
    return replace(
        qtensor,
        codes=cut(qtensor.codes),
        scale=cut(qtensor.scale),
        zero_point=None if zero_point is None else cut(zero_point),
    )
