"""Calibrates a block's KV-cache scales: the largest key and value that the samples produce.

Keys are taken after their norm and their rotation, since that is what a cache holds; both through
the block as it was quantized. One scale a layer for keys and one for values brings the largest
magnitude to the largest code (448 of E4M3, 127 of int8).
"""

import torch
from quantforge_kernels import rope as rope_op
from quantforge_kernels.kv_store import INT8_MAX
from quantforge_kernels.rounding import FP8_MAX
from torch import Tensor

from quantforge.calibration.activations import Activations
from quantforge.checkpoint.kv_scales import SUFFIXES
from quantforge.errors import CalibrationError
from quantforge.models.decoder import DecoderBlock
from quantforge.schemes import TensorQuant


@torch.inference_mode()
def kv_absmax(block: DecoderBlock, activations: Activations) -> tuple[float, float]:
    """Largest magnitude of the rotated keys and of the values of `block`, over all samples."""
    largest = torch.zeros(2, device=activations.device)
    for hidden, rope in activations.batches():
        normed = block.input_layernorm(hidden, None)[0]
        _, k, v = block.self_attn.project(normed)
        _, k = rope_op.OP.reference.run(k, k, rope.cos, rope.sin)
        largest = torch.maximum(largest, torch.stack([k.abs().amax(), v.abs().amax()]).float())
    key, value = largest.tolist()
    return key, value


def calibrate_kv_scales(
    layer: int, block: DecoderBlock, activations: Activations, quant: TensorQuant
) -> dict[str, Tensor]:
    """The block's ``self_attn.k_scale`` and ``self_attn.v_scale``, float32 [1] on the CPU.

    Raises `CalibrationError` naming a layer whose keys or values are all zero or not finite.
    """
    largest_code = FP8_MAX if quant.dtype == "float" else INT8_MAX
    scales = {}
    for what, name, absmax in zip(
        ("keys", "values"), SUFFIXES, kv_absmax(block, activations), strict=True
    ):
        scale = torch.tensor([absmax / largest_code], dtype=torch.float32)
        if not bool(scale.isfinite().all()) or float(scale) <= 0:
            raise CalibrationError(
                f"the largest {what} of layer {layer} is {absmax} over the calibration samples, "
                "which gives no scale for a KV cache; check the model, or leave kv_cache at none"
            )
        scales[name] = scale
    return scales
