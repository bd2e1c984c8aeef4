"""Gram matrices in strips, and where hidden states are kept."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantforge.calibration import capture, hidden
from quantforge.calibration.activations import Activations
from quantforge.calibration.hidden import Place, allocate, choose_place
from quantforge.checkpoint.reader import CheckpointReader
from quantforge.errors import CalibrationError
from quantforge.models.loader import architecture_of, load_block, load_config, load_embedding

TinyModel = Callable[..., Path]

CPU = torch.device("cpu")


@pytest.mark.parametrize("width", [1, 31, 64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_strips_add_up_to_the_whole_gram_matrix(
    width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "MIN_STRIP", 8)
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randn(n, width, generator=generator).to(dtype) for n in (17, 1, 50)]
    total = torch.zeros(width, width)
    for batch in batches:
        capture.add_gram(total, batch)
    capture.mirror_upper(total)
    wide = torch.cat(batches).double()
    expected = wide.T @ wide
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(total, total.T)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [576, 4096, 5000])
def test_narrow_inputs_on_a_gpu_are_multiplied_exactly(width: int, dtype: torch.dtype) -> None:
    """Products of 16-bit numbers are exact in float32. Tensor cores add 16 of them at a time to the
    sum and cut off what lies below its last bit: at most 2^-23 of the sum each time.
    """
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3000, width, generator=generator).to(dtype)
    total = torch.zeros(width, width, device="cuda")
    capture.add_gram(total, x.cuda())
    capture.mirror_upper(total)
    wide = x.double()
    expected = wide.T @ wide
    error = float((total.cpu().double() - expected).norm() / expected.norm())
    assert error < len(x) / 16 * 2**-23


def run_through(folder: Path, place: Place, scratch: Path) -> Any:
    reader = CheckpointReader(folder)
    arch, config = architecture_of(reader.config), load_config(reader.config)
    activations = Activations(
        torch.randint(3, 512, (5, 24), generator=torch.Generator().manual_seed(1)),
        load_embedding(reader, arch, CPU, torch.bfloat16),
        config,
        device=CPU,
        dtype=torch.bfloat16,
        batch_tokens=48,
        place=place,
        folder=scratch,
    )
    for layer in range(config.num_layers):
        block = load_block(reader, config, arch, layer, device=CPU, dtype=torch.bfloat16)
        activations.advance(block)
    return activations.hidden


def test_hidden_states_on_disk_are_those_in_memory_and_leave_no_file(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    on_disk = run_through(tiny_model(), Place.DISK, scratch)
    assert list(scratch.iterdir()) == []
    assert torch.equal(on_disk, run_through(tiny_model(), Place.HOST, scratch))


def test_the_disk_is_the_last_resort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden, "available_host_bytes", lambda: 1000)
    assert choose_place(500, CPU) == Place.HOST
    assert choose_place(501, CPU) == Place.DISK
    monkeypatch.setattr(hidden, "available_host_bytes", lambda: None)
    assert choose_place(1 << 60, CPU) == Place.HOST


def test_a_disk_without_room_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hidden.os, "posix_fallocate", full)
    with pytest.raises(CalibrationError, match=r"0\.00 GB fit neither .* No space left on device"):
        allocate((10, 10), torch.float32, CPU, Place.DISK, tmp_path)
    assert list(tmp_path.iterdir()) == []
