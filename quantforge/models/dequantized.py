"""A quantized checkpoint read as the dense model that it stands for, one tensor at a time.

`quantize --dequantize` starts from it: weights are dequantized when they are asked for and rounded
once to the model's dtype, and the rest of the folder is as it lies. What the first quantization
lost stays lost; the manifest says where the weights come from.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from quantforge.checkpoint.base import TensorSpec
from quantforge.checkpoint.inspection import quantized_layers
from quantforge.checkpoint.manifest import read_manifest
from quantforge.checkpoint.reader import CheckpointReader
from quantforge.errors import CheckpointError, UsageError
from quantforge.models.expected import block_tensors, check_checkpoint, check_finite
from quantforge.models.loader import architecture_of, load_config
from quantforge.models.partition import Partition
from quantforge.qtensor import QuantizedTensor


class DequantizedReader(CheckpointReader):
    """The quantized model in `folder` with a dense ``weight`` for every quantized layer.

    Raises `UsageError` for a model that is not quantized, and what a reader raises.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.source = CheckpointReader(folder)
        if self.layout is None or self.format is None:
            raise UsageError(f"{folder} is not quantized; leave --dequantize out")
        self.source_format = self.format.name
        self._dense = self._dense_specs()
        self.config = {k: v for k, v in self.config.items() if k != "quantization_config"}
        self.layout = self.format = None

    def _dense_specs(self) -> dict[str, TensorSpec]:
        """Name -> shape and dtype of what the dense model has, embedding and norms included."""
        reader = self.source
        arch, config = architecture_of(reader.config), load_config(reader.config)
        check_checkpoint(reader, config, arch, Partition())
        assert reader.format is not None, "the model is quantized"
        quantized = self._quantized = frozenset(quantized_layers(reader))
        self.schemes = sorted({str(reader.scheme(layer)) for layer in quantized})
        specs = {}
        for layer in sorted(quantized):
            try:
                shape = reader.format.layer_shape(reader.layer_tensors(layer))
            except CheckpointError as error:
                raise CheckpointError(f"{reader.folder}: layer {layer}: {error}") from error
            specs[f"{layer}.weight"] = TensorSpec(shape=shape, dtype=config.dtype)
        prefixes = tuple(arch.block_prefix.format(layer=i) for i in range(config.num_layers))
        known = {prefix + name for prefix in prefixes for name in block_tensors(config)}
        for name in reader.names():
            is_other = not name.startswith(prefixes) and name.rpartition(".")[0] not in quantized
            if name not in specs and (name in known or is_other):
                specs[name] = reader.spec(name)
        return specs

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._dense))

    def __contains__(self, name: object) -> bool:
        return name in self._dense

    def spec(self, name: str) -> TensorSpec:
        if name not in self._dense:
            raise CheckpointError(f"{self.folder}: tensor {name} is missing")
        return self._dense[name]

    def tensor(self, name: str) -> Tensor:
        layer, _, suffix = name.rpartition(".")
        if suffix != "weight" or layer not in self._quantized:
            return super().tensor(name)
        weight = self.source.linear(layer)
        assert isinstance(weight, QuantizedTensor), "config.json says that it is quantized"
        dense = weight.dequantize(self.spec(name).dtype)
        check_finite(self, name, dense)
        return dense

    def num_weight_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self._dense.values())


def open_source(folder: Path, *, dequantize: bool) -> CheckpointReader:
    """A reader of the dense model to quantize; of a quantized one only with `dequantize`."""
    return DequantizedReader(folder) if dequantize else CheckpointReader(folder)


def source_origin(reader: CheckpointReader) -> dict[str, Any]:
    """What a manifest's ``source`` says of a source that was dequantized; else nothing."""
    if not isinstance(reader, DequantizedReader):
        return {}
    origin: dict[str, Any] = {"format": reader.source_format, "schemes": reader.schemes}
    manifest = read_manifest(reader.folder)
    if manifest is not None:
        origin |= {"method": manifest.method, "source": dict(manifest.source)}
    return {"dequantized_from": origin}
