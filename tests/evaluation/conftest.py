"""A fake engine whose logits are a fixed function of token and position; two tiny real models."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

VOCAB = 61


class FakeEngine:
    """Row p of a window's logits is a table's row for token p, plus a ripple of p."""

    def __init__(
        self,
        seed: int = 0,
        *,
        noise: float = 0.0,
        vocab: int = VOCAB,
        block: int = 7,
        max_model_len: int = 512,
        broken: Callable[[int, int], float | None] | None = None,
        reuse_buffer: bool = False,
    ) -> None:
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.max_model_len = max_model_len
        self.block = block
        self.broken = broken
        self.calls: list[int] = []
        self.unwound = 0
        self.reuse_buffer = reuse_buffer
        generator = torch.Generator().manual_seed(seed)
        self.table = 3 * torch.randn(VOCAB, vocab, generator=generator)
        self.table += noise * torch.randn(VOCAB, vocab, generator=generator)

    def kernels(self) -> dict[str, str]:
        return {"attention": "fake"}

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """All rows [T, V] of one window: what the oracle reads."""
        positions = torch.arange(len(token_ids), dtype=torch.float32)[:, None]
        return self.table[list(token_ids)] + torch.sin(positions)

    def score(self, windows: Any, consume: Any, progress: Any = None) -> None:
        buffer = torch.empty(self.block, self.table.shape[1])
        try:
            for index, token_ids in enumerate(windows):
                rows = self.logits(token_ids)
                for start in range(0, len(token_ids), self.block):
                    part = rows[start : start + self.block].clone()
                    if self.broken is not None:
                        value = self.broken(index, start)
                        if value is not None:
                            part[-1, 3] = value
                    if self.reuse_buffer:
                        buffer[: len(part)] = part
                        part = buffer[: len(part)]
                    self.calls.append(start)
                    consume(index, start, part)
                    if self.reuse_buffer:
                        buffer.fill_(float("nan"))
        except BaseException:
            self.unwound += 1
            raise


@pytest.fixture
def fake_engine() -> type[FakeEngine]:
    return FakeEngine


@pytest.fixture
def token_ids() -> list[int]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, VOCAB, (200,), generator=generator).tolist()


def change_weights(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Rewrites each tensor of a checkpoint of one file."""
    path = folder / "model.safetensors"
    tensors = {name: change(name, tensor) for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture
def text_file(tmp_path: Path, tiny: Any) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(tiny.TEXT * 3, encoding="utf-8")
    return path


@pytest.fixture
def pair(tiny_model: Callable[..., Path]) -> tuple[Path, Path]:
    """(model, baseline): the model's weights are the baseline's with 5 % noise."""
    model, baseline = tiny_model(), tiny_model()
    torch.manual_seed(3)
    change_weights(model, lambda name, w: w + 0.05 * w.std() * torch.randn_like(w))
    return model, baseline


@pytest.fixture
def changed_weights() -> Callable[..., None]:
    """``changed_weights(folder, change)``: see `change_weights`."""
    return change_weights
