"""What the refusals of Triton candidates share."""

from importlib.util import find_spec

import torch

HALF = (torch.bfloat16, torch.float16)
FLOATS = (*HALF, torch.float32)


def refuse_triton(device: str, dtype: torch.dtype, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """Why a Triton kernel for `dtypes` does not serve `dtype` on `device`, or None."""
    if device != "cuda":
        return f"runs on cuda, not on {device}"
    if dtype not in dtypes:
        return f"takes {' or '.join(str(d).removeprefix('torch.') for d in dtypes)}, not {dtype}"
    return None if find_spec("triton") else "triton is not installed"
