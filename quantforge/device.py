"""Turns the words of ``--device`` and ``--dtype`` into torch's objects."""

import torch

from quantforge.errors import UnsupportedError, UsageError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """The device called `name`; ``auto`` is CUDA where there is one. Raises `UnsupportedError`."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"unknown device {name!r}; use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(
            f"device {name!r} was asked for, but torch {torch.__version__} sees no CUDA GPU; "
            "run 'quantforge doctor' to see why, or use --device cpu"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UnsupportedError(
            f"device {name!r} does not exist; this machine has "
            f"{torch.cuda.device_count()} CUDA GPU(s)"
        )
    return device


def resolve_dtype(name: str, device: torch.device, model_dtype: torch.dtype) -> torch.dtype:
    """The compute dtype called `name`; ``auto`` is float32 on a CPU and the model's on a GPU."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else model_dtype
    if name not in DTYPES:
        raise UsageError(f"unknown dtype {name!r}; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]
