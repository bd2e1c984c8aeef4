"""`Linear`: a projection whose inner product can be dense or any quantized kernel.

Legend: M tokens, N out features, K in features.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from quantforge_kernels import w4a16
from quantforge_kernels.op import KernelUnavailableError
from torch import Tensor, nn

from quantforge.errors import UnsupportedError
from quantforge.qtensor import QuantizedTensor
from quantforge.schemes import TensorQuant


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
    """A weight-only quantized product through the kernel that `w4a16.OP` selects.

    Inputs are put into the order of a weight that has a permutation.
    """

    def __init__(
        self, qtensor: QuantizedTensor, bias_N: Tensor | None, compute_dtype: torch.dtype
    ) -> None:
        device = qtensor.codes.device
        candidate = w4a16.OP.select(
            **kernel_problem(qtensor.quant, qtensor.shape, device, compute_dtype)
        )
        plain = (qtensor.codes, qtensor.scale, qtensor.zero_point)
        self.kernel = candidate.name
        self.scheme = str(qtensor.quant)
        self.run = candidate.run
        self.tensors = candidate.repack(*plain, compute_dtype) if candidate.repack else plain
        self.bias = bias_N
        self.permutation = qtensor.permutation

    def __call__(self, x_MK: Tensor) -> Tensor:
        if self.permutation is not None:
            x_MK = x_MK[..., self.permutation]
        out: Tensor = self.run(x_MK, *self.tensors, self.bias)
        return out


def kernel_problem(
    quant: TensorQuant, shape: tuple[int, int], device: torch.device, compute_dtype: torch.dtype
) -> dict[str, Any]:
    """What `w4a16.OP` is asked to serve: a weight of `shape` [N, K] under `quant`."""
    return {
        "device": device.type,
        "dtype": compute_dtype,
        "shape": shape,
        "num_bits": quant.num_bits,
        "symmetric": quant.symmetric,
        "group_size": quant.group_size,
    }


def serving_kernel(
    quant: TensorQuant, shape: tuple[int, int], device: torch.device, compute_dtype: torch.dtype
) -> tuple[str | None, str | None]:
    """(kernel, None) that a weight of `shape` [N, K] will be multiplied by, or (None, reason)."""
    if quant.dtype != "int":
        return None, f"no kernel loads weight scheme {quant}"
    try:
        candidate = w4a16.OP.select(**kernel_problem(quant, shape, device, compute_dtype))
    except KernelUnavailableError as error:
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
        self, qtensor: QuantizedTensor, bias_N: Tensor | None, compute_dtype: torch.dtype
    ) -> None:
        """Multiply by a quantized weight through the best kernel for its device and scheme."""
        if qtensor.quant.dtype != "int":
            raise UnsupportedError(f"no kernel loads weight scheme {qtensor.quant}")
        self.inner = QuantizedInner(qtensor, bias_N, compute_dtype)

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
