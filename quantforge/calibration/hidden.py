"""Where the hidden states of the calibration samples are kept: GPU, host memory or disk.

They are kept in the first place that has room. On disk they are a mapped file without a name, so
that nothing is left of it however the run ends.
"""

import os
import tempfile
from enum import StrEnum
from pathlib import Path

import torch
from torch import Tensor

from quantforge.errors import CalibrationError
from quantforge.memory import available_host_bytes

DEVICE_SHARE = 0.25
"""Part of a GPU's free memory that the hidden states may take."""
HOST_SHARE = 0.5
"""Part of the host's available memory that they may take."""


class Place(StrEnum):
    """On a CPU device, `HOST` is the device."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


def choose_place(num_bytes: int, device: torch.device) -> Place:
    """The first place with room for hidden states of `num_bytes`."""
    if device.type != "cpu":
        free, _ = torch.cuda.mem_get_info(device)
        if num_bytes <= free * DEVICE_SHARE:
            return Place.DEVICE
    available = available_host_bytes()
    fits = available is None or num_bytes <= available * HOST_SHARE
    return Place.HOST if fits else Place.DISK


def allocate(
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    place: Place,
    folder: Path | None = None,
) -> Tensor:
    """An uninitialised tensor in `place`; `folder` (default: the system's) is where a file goes.

    Host memory is pinned for a GPU. Raises `CalibrationError` when the disk has no room.
    """
    if place == Place.DEVICE:
        return torch.empty(shape, dtype=dtype, device=device)
    if place == Place.HOST:
        return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
    count = shape[0] * shape[1]
    num_bytes = count * dtype.itemsize
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".quantforge-hidden-") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)  # a full disk must not be found later
            flat = torch.from_file(file.name, shared=True, size=count, dtype=dtype)
    except OSError as error:
        raise CalibrationError(
            f"hidden states of {num_bytes / 1e9:.2f} GB fit neither in memory nor in "
            f"{folder or tempfile.gettempdir()}: {error.strerror}; use fewer calibration samples"
        ) from error
    return flat.reshape(shape)
