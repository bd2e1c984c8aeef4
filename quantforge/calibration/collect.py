"""Takes the statistics of every block of an unquantized model, for later runs of `quantize`."""

import torch

from quantforge.calibration.activations import Activations
from quantforge.calibration.capture import Capture, InputStatistics
from quantforge.calibration.data import CalibrationSet
from quantforge.checkpoint.reader import CheckpointReader
from quantforge.models.expected import check_checkpoint
from quantforge.models.loader import architecture_of, load_block, load_config, load_embedding
from quantforge.models.partition import Partition
from quantforge.progress import Progress, silent

MAX_GRAM_BYTES = 4_000_000_000
"""Above this size in all, only the diagonals of the Gram matrices are kept by default."""

CPU = torch.device("cpu")

LayerStatistics = dict[int, dict[str, InputStatistics]]


def gram_bytes(reader: CheckpointReader) -> int:
    """Size of the Gram matrices of all input groups, in bytes."""
    architecture, config = architecture_of(reader.config), load_config(reader.config)
    total = 0
    for layer in range(config.num_layers):
        prefix = architecture.block_prefix.format(layer=layer)
        for group in architecture.input_groups:
            columns = reader.spec(f"{prefix}{group.members[0]}.weight").shape[1]
            total += columns * columns * 4
    return total


def collect_statistics(
    reader: CheckpointReader,
    calibration: CalibrationSet,
    *,
    device: torch.device,
    dtype: torch.dtype,
    diagonal: bool | None = None,
    progress: Progress = silent,
) -> LayerStatistics:
    """Statistics by layer and input group, on the CPU; block by block, the model as it is.

    `diagonal` keeps only the diagonals of the Gram matrices (default: where `MAX_GRAM_BYTES` would
    be exceeded).
    """
    architecture, config = architecture_of(reader.config), load_config(reader.config)
    check_checkpoint(reader, config, architecture, Partition())
    if diagonal is None:
        diagonal = gram_bytes(reader) > MAX_GRAM_BYTES
    activations = Activations(
        calibration.token_ids,
        load_embedding(reader, architecture, device, dtype),
        config,
        device=device,
        dtype=dtype,
    )
    layers: LayerStatistics = {}
    for layer in range(config.num_layers):
        progress("calibrating blocks", layer, config.num_layers)
        block = load_block(reader, config, architecture, layer, device=device, dtype=dtype)
        capture = Capture(architecture.input_groups, diagonal=diagonal)
        with capture.watching(block):
            activations.advance(block)
        found = capture.results(layer, activations.length)
        layers[layer] = {n: s.to(CPU) for n, s in found.items()}
    progress("calibrating blocks", config.num_layers, config.num_layers)
    return layers
