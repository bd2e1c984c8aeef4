"""Peak memory: what is mapped from a file does not count, what a program fills does."""

from pathlib import Path

import torch

from quantforge.memory import AnonymousPeak, anonymous_bytes, available_host_bytes

SIZE = 64 << 20


def test_memory_that_is_filled_counts_though_it_is_gone_at_the_end() -> None:
    before = anonymous_bytes()
    with AnonymousPeak() as peak:
        filled = torch.ones(SIZE, dtype=torch.uint8)
        peak.sample()
        del filled
    assert peak.num_bytes >= before + SIZE // 2


def test_a_mapped_file_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "mapped"
    path.write_bytes(bytes(SIZE))
    with AnonymousPeak() as peak:
        start = anonymous_bytes()
        mapped = torch.from_file(str(path), shared=True, size=SIZE, dtype=torch.uint8)
        assert int(mapped.max()) == 0
        peak.sample()
    assert peak.num_bytes < start + SIZE // 2


def test_the_machine_has_memory() -> None:
    available = available_host_bytes()
    assert available is not None
    assert available > 0
