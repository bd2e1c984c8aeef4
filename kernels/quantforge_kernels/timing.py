"""Time of a kernel on the GPU, launches captured in a CUDA graph over inputs that rotate.

Each launch reads weights that no cache holds any more: the copies together are larger than twice
the L2 cache, and one replay goes through all of them.
"""

import statistics
from collections.abc import Callable, Sequence

import torch

COLD_BYTES = 160 * 2**20
"""More than twice the L2 cache of any GPU so far (an H200 has 60 MB)."""


def copies_to_be_cold(num_bytes: int, at_least: int = 4, at_most: int = 40) -> int:
    """How many copies of a weight of `num_bytes` must rotate."""
    return min(max(-(-COLD_BYTES // num_bytes), at_least), at_most)


def graph_us(launches: Sequence[Callable[[], object]], replays: int = 10) -> float:
    """Median microseconds a launch of one graph that holds `launches` in this order."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launches[0]()  # compile and load outside of the capture
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / len(launches))
    return statistics.median(times)
