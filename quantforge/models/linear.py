"""`Linear`: a projection whose inner product can be dense or any quantized kernel.

Legend: M tokens, N out features, K in features.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from quantforge_kernels import dequantized, fp8_gemm, int8_gemm, w4a16
from quantforge_kernels.op import KernelUnavailableError, Op
from torch import Tensor, nn

from quantforge.errors import UnsupportedError
from quantforge.qtensor import QuantizedTensor
from quantforge.schemes import QuantScheme, TensorQuant

FUSED_INT_BITS = (4, 8)
"""Widths of integer codes that the kernels of `w4a16` read; others are dequantized at load."""

TOKENWISE = ("token", "group")
"""Granularities of activations whose scales do not depend on the other tokens of a batch."""


class LinearInner(Protocol):
    """What multiplies: built once when the layer is loaded."""

    kernel: str

    def __call__(self, x_MK: Tensor) -> Tensor: ...


class DenseInner:
    """``x @ weight.T + bias`` in the weight's dtype."""

    kernel = "dense"

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None) -> None:
        self.weight = weight_NK
        self.bias = bias_N

    def __call__(self, x_MK: Tensor) -> Tensor:
        return F.linear(x_MK, self.weight, self.bias)


class QuantizedInner:
    """A product with a quantized weight through the kernel that the scheme's op selects.

    Inputs are put into the order of a weight that has a permutation.
    """

    def __init__(
        self,
        qtensor: QuantizedTensor,
        bias_N: Tensor | None,
        compute_dtype: torch.dtype,
        activation: TensorQuant | None = None,
    ) -> None:
        scheme = QuantScheme(weight=qtensor.quant, activation=activation)
        if scheme.has_static_inputs and qtensor.input_scale is None:
            raise UnsupportedError(f"scheme {scheme} needs an input_scale; the weight has none")
        problem = kernel_problem(scheme, qtensor.shape, qtensor.codes.device, compute_dtype)
        op = serving_op(scheme)
        candidate = op.select(**problem)
        plain: tuple[Any, ...] = (qtensor.codes, qtensor.scale, qtensor.zero_point)
        if op is dequantized.OP:
            plain = (qtensor.dequantize().to(compute_dtype),)
        if op is fp8_gemm.OP:
            runs = (problem["block_shape"], problem["activation_group"])
            plain = (*plain[:2], *runs, qtensor.input_scale)
        elif op is int8_gemm.OP:
            plain = (*plain[:2], qtensor.input_scale)
        self.kernel = candidate.name
        self.scheme = str(scheme)
        self.run = candidate.run
        self.operands = candidate.repack(*plain, compute_dtype) if candidate.repack else plain
        self.bias = bias_N
        self.permutation = None if op is dequantized.OP else qtensor.permutation

    def __call__(self, x_MK: Tensor) -> Tensor:
        if self.permutation is not None:
            x_MK = x_MK[..., self.permutation]
        out: Tensor = self.run(x_MK, *self.operands, self.bias)
        return out


def serving_op(scheme: QuantScheme) -> Op:
    """The op that multiplies by weights of `scheme`; raises `UnsupportedError` without one."""
    weight, activation = scheme.weight, scheme.activation
    if activation is None and is_dequantized(weight):
        return dequantized.OP
    if weight.dtype == "int" and activation is None:
        return w4a16.OP
    is_fp8 = weight.num_bits == 8 and weight.dtype == "float"
    whole = weight.granularity in ("tensor", "channel", "block")
    if is_fp8 and whole and (activation is None or _is_fp8_input(activation)):
        return fp8_gemm.OP
    is_int8 = weight.num_bits == 8 and weight.dtype == "int" and weight.symmetric
    if is_int8 and weight.granularity == "channel" and _is_int8_input(activation):
        return int8_gemm.OP
    raise UnsupportedError(f"no kernel multiplies weights and inputs of scheme {scheme}")


def is_dequantized(weight: TensorQuant) -> bool:
    """Whether weights of this scheme are dequantized once, at load: no fused kernel reads them."""
    if weight.dtype == "int":
        return weight.num_bits not in FUSED_INT_BITS
    return weight.scale_format is not None


def serving_note(scheme: QuantScheme) -> str | None:
    """What a user should know of how `scheme` is served; None where a kernel reads it."""
    try:
        op = serving_op(scheme)
    except UnsupportedError:
        return None
    if op is not dequantized.OP:
        return None
    return (
        f"dequantize-once: no fused kernel for {scheme}; the weights are small on disk, and dense "
        "in the compute dtype once loaded"
    )


def serving_notes(schemes: Iterable[QuantScheme]) -> list[str]:
    """The notes of a model that has all of `schemes`, each once."""
    return [note for s in dict.fromkeys(schemes) if (note := serving_note(s)) is not None]


def _is_fp8_input(activation: TensorQuant) -> bool:
    """E4M3 inputs under scales a token or a run of it, or under one static scale."""
    fits = TOKENWISE if activation.dynamic else ("tensor",)
    code = (activation.dtype, activation.num_bits)
    return code == ("float", 8) and activation.granularity in fits


def _is_int8_input(activation: TensorQuant | None) -> bool:
    """Symmetric int8 inputs under one scale a token, or under one static scale."""
    if activation is None or not activation.symmetric:
        return False
    code = (activation.dtype, activation.num_bits)
    fits = "token" if activation.dynamic else "tensor"
    return code == ("int", 8) and activation.granularity == fits


def kernel_problem(
    scheme: QuantScheme, shape: tuple[int, int], device: torch.device, compute_dtype: torch.dtype
) -> dict[str, Any]:
    """What `serving_op` of `scheme` is asked to serve: a weight of `shape` [N, K]."""
    weight, activation = scheme.weight, scheme.activation
    problem: dict[str, Any] = {"device": device.type, "dtype": compute_dtype, "shape": shape}
    if is_dequantized(weight):
        return problem | {"scheme": str(weight)}
    if weight.dtype == "float":
        dynamic = activation is not None and activation.dynamic
        group = (activation.group_size or shape[1]) if activation and dynamic else None
        return problem | {
            "block_shape": weight.block_shape,
            "activation_group": group,
            "static_input": scheme.has_static_inputs,
        }
    if activation is not None:
        return problem | {"static_input": scheme.has_static_inputs}
    return problem | {
        "num_bits": weight.num_bits,
        "symmetric": weight.symmetric,
        "group_size": weight.group_size,
    }


def serving_kernel(
    scheme: QuantScheme, shape: tuple[int, int], device: torch.device, compute_dtype: torch.dtype
) -> tuple[str | None, str | None]:
    """(kernel, None) that a weight of `shape` [N, K] will be multiplied by, or (None, reason)."""
    try:
        op = serving_op(scheme)
        candidate = op.select(**kernel_problem(scheme, shape, device, compute_dtype))
    except (KernelUnavailableError, UnsupportedError) as error:
        return None, str(error)
    return candidate.name, None


class Linear(nn.Module):
    """A projection [out_features, in_features]; empty until `load_dense` or `load_quantized`."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.inner: LinearInner | None = None

    def load_dense(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
        """Multiply by `weight_NK` as it is."""
        self.inner = DenseInner(weight_NK, bias_N)

    def load_quantized(
        self,
        qtensor: QuantizedTensor,
        bias_N: Tensor | None,
        compute_dtype: torch.dtype,
        activation: TensorQuant | None = None,
    ) -> None:
        """Multiply by a quantized weight through the best kernel for its device and scheme.

        `activation` says how inputs are quantized before that, None that they are not.
        """
        self.inner = QuantizedInner(qtensor, bias_N, compute_dtype, activation)

    @property
    def weight(self) -> Tensor:
        """The dense weight [N, K]; only for layers loaded dense."""
        assert isinstance(self.inner, DenseInner), "the layer holds no dense weight"
        return self.inner.weight

    @property
    def bias(self) -> Tensor | None:
        return getattr(self.inner, "bias", None)

    def forward(self, x_MK: Tensor) -> Tensor:
        assert self.inner is not None, "the layer is not loaded"
        return self.inner(x_MK)


def split_outputs(y_MN: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Views of a merged projection's output, one a part."""
    return torch.split(y_MN, list(sizes), dim=-1)
