"""Arrays packed into one buffer come out as they went in."""

import torch

from quantforge.runtime.packing import ALIGNMENT_BYTES, Layout, to_device

CPU = torch.device("cpu")


def test_numbers_of_every_dtype_arrive_unchanged() -> None:
    columns = [
        (torch.int64, [-(2**63), 2**63 - 1, 7]),
        (torch.int32, [[1, -2], [3, 2**31 - 1], [0, 5]]),
        (torch.float32, [0.1, 1e-30, float("inf")]),
        (torch.int64, []),
        (torch.int32, [9]),
    ]
    found = to_device(columns, CPU)
    for tensor, (dtype, numbers) in zip(found, columns, strict=True):
        assert torch.equal(tensor, torch.tensor(numbers, dtype=dtype))
        assert tensor.is_contiguous()


def test_arrays_are_aligned_and_do_not_overlap() -> None:
    layout = Layout([(torch.int64, (3,)), (torch.int32, (5, 7)), (torch.int32, (1,))])
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    assert all(start % ALIGNMENT_BYTES == 0 for start in layout.starts)
    for view in layout.views(buffer):
        view.fill_(-1)  # every bit set: 8 * 3 + 4 * 35 + 4 bytes, each once
    assert int((buffer == 255).sum()) == 168
