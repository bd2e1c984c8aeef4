"""Builds decoders and blocks from a checkpoint, tensor by tensor.

Names, shapes and schemes are checked before anything is loaded; values as they arrive. The
runtime's decoder has q/k/v and gate/up joined where that is exact; the quantizer's blocks are
dense and apart, as on disk.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from quantforge_kernels.op import KernelUnavailableError
from torch import Tensor, nn

from quantforge.checkpoint.kv_scales import SUFFIXES, read_kv_scale
from quantforge.checkpoint.reader import CheckpointReader
from quantforge.errors import UnsupportedError, UsageError
from quantforge.models.arch.base import Architecture
from quantforge.models.config import ModelConfig
from quantforge.models.decoder import Decoder, DecoderBlock, RMSNorm, bind_ops
from quantforge.models.expected import (
    block_linears,
    check_block,
    check_checkpoint,
    check_finite,
    read_tensor,
)
from quantforge.models.kv_scales import KVScales
from quantforge.models.linear import Linear
from quantforge.models.partition import Partition, Weight, join, join_biases, joinable
from quantforge.progress import Progress, silent
from quantforge.registry import entry_names, load_entry
from quantforge.schemes import TensorQuant

logger = logging.getLogger(__name__)

ARCH_PACKAGE = "quantforge.models.arch"

Device = torch.device | str


def supported_architectures() -> dict[str, Architecture]:
    """Every family by its class name in config.json."""
    found = (
        load_entry(ARCH_PACKAGE, name, "architecture").ARCH for name in entry_names(ARCH_PACKAGE)
    )
    return {arch.hf_class: arch for arch in found}


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """The family of a config.json. Raises `UnsupportedError` that lists the supported ones."""
    names = config.get("architectures") or []
    supported = supported_architectures()
    known = ", ".join(sorted(supported))
    if not isinstance(names, list) or len(names) != 1:
        raise UnsupportedError(
            f"config.json: architectures {names!r} does not name one class; supported: {known}"
        )
    if names[0] not in supported:
        raise UnsupportedError(f"architecture {names[0]!r} is not supported; supported: {known}")
    return supported[names[0]]


def load_config(config: Mapping[str, Any]) -> ModelConfig:
    """The `ModelConfig` of a config.json's content; errors as `architecture_of` and
    `hf_config.decoder_config` raise them."""
    return architecture_of(config).config_from_hf(config)


def load_decoder(
    reader: CheckpointReader,
    *,
    device: Device,
    dtype: torch.dtype,
    merge: bool = True,
    rank: int = 0,
    world: int = 1,
    progress: Progress = silent,
) -> Decoder:
    """The whole model on `device`, dense tensors in `dtype`, quantized ones as they are.

    With `merge`, q/k/v and gate/up are one linear each where that is exact. With `world` > 1 the
    blocks hold rank `rank`'s heads and MLP slice (`Decoder.config` has its sizes), embedding,
    norms and lm_head are whole. Raises `CheckpointError` naming the tensor that is missing, has
    another shape or holds NaN, and `UnsupportedError` for what no kernel here can run.
    """
    arch = architecture_of(reader.config)
    whole = arch.config_from_hf(reader.config)
    part = Partition(rank=rank, world=world)
    local = part.local(whole)
    check_checkpoint(reader, whole, arch, part)
    source = _Source(reader=reader, device=device, dtype=dtype, part=part)
    with torch.device("meta"):
        decoder = Decoder(local)
    decoder.kv_scales = load_kv_scales(reader, whole.num_layers, arch, device)
    steps = local.num_layers + 1
    decoder.embed_tokens = _parameter(load_embedding(reader, arch, device, dtype))
    decoder.norm = load_norm(reader, arch.final_norm, whole.rms_norm_eps, device, dtype)
    decoder.lm_head = _load_head(source, arch, whole, decoder.embed_tokens)
    progress("load", 1, steps)
    for layer in range(local.num_layers):
        block = decoder.layers[layer]
        assert isinstance(block, DecoderBlock)
        _fill_block(block, source, arch.block_prefix.format(layer=layer), merge=merge)
        progress("load", layer + 2, steps)
    decoder.bind(torch.device(device), dtype)
    return decoder


def load_block(
    reader: CheckpointReader,
    config: ModelConfig,
    arch: Architecture,
    layer: int,
    *,
    device: Device,
    dtype: torch.dtype,
    fused: bool = False,
) -> DecoderBlock:
    """Block `layer` with dense linears apart, as the quantizer works on it.

    `fused` binds the kernels of the device, which have no backward pass, to its norms and MLP.
    Raises `UsageError` when its linears are quantized already, `CheckpointError` as `load_decoder`.
    """
    prefix = arch.block_prefix.format(layer=layer)
    for name in block_linears(config):
        scheme = reader.scheme(prefix + name)
        if scheme is not None:
            raise UsageError(
                f"{reader.folder}: {prefix}{name} is quantized already ({scheme}); "
                "quantize the original model"
            )
    check_block(reader, config, prefix)
    with torch.device("meta"):
        block = DecoderBlock(config, layer)
    source = _Source(reader=reader, device=device, dtype=dtype, part=Partition())
    _fill_block(block, source, prefix, merge=False)
    if fused:
        bind_ops(block, torch.device(device), dtype)
    return block


def load_embedding(
    reader: CheckpointReader, arch: Architecture, device: Device, dtype: torch.dtype
) -> Tensor:
    """The token embedding [vocab_size, hidden_size]."""
    return read_tensor(reader, arch.embedding, device, dtype)


def load_kv_scales(
    reader: CheckpointReader, num_layers: int, arch: Architecture, device: Device
) -> KVScales | None:
    """The calibrated scales of the KV cache, None where the checkpoint has none.

    Raises `CheckpointError` naming a scale that is missing, not finite or not above 0.
    """
    quant = None if reader.layout is None else reader.layout.kv_cache
    if quant is None:
        return None
    prefixes = [arch.block_prefix.format(layer=layer) for layer in range(num_layers)]
    keys, values = (
        torch.tensor([read_kv_scale(reader, p + suffix) for p in prefixes], device=device)
        for suffix in SUFFIXES
    )
    return KVScales(quant=quant, keys=keys, values=values)


def load_norm(
    reader: CheckpointReader, name: str, eps: float, device: Device, dtype: torch.dtype
) -> RMSNorm:
    """The norm whose weight is the tensor `name`."""
    weight = read_tensor(reader, name, device, dtype)
    with torch.device("meta"):
        norm = RMSNorm(weight.shape[0], eps)
    norm.weight = _parameter(weight)
    return norm


def load_head(
    reader: CheckpointReader,
    config: ModelConfig,
    arch: Architecture,
    *,
    device: Device,
    dtype: torch.dtype,
) -> Linear:
    """The lm_head; of a tied model, the embedding."""
    source = _Source(reader=reader, device=device, dtype=dtype, part=Partition())
    return _load_head(source, arch, config, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """Where weights come from and where they go to."""

    reader: CheckpointReader
    device: Device
    dtype: torch.dtype
    part: Partition

    def linear(self, prefix: str, name: str) -> tuple[Weight, Tensor | None]:
        """This rank's weight and bias of linear `name` under `prefix`: on the device, finite."""
        layer = prefix + name
        weight = self.part.cut(name, self.reader.linear(layer))
        bias = None
        if f"{layer}.bias" in self.reader:
            bias = read_tensor(self.reader, f"{layer}.bias", self.device, self.dtype)
        bias = self.part.cut_bias(name, bias)
        if isinstance(weight, Tensor):
            dense = weight.to(self.device, self.dtype)
            check_finite(self.reader, f"{layer}.weight", dense)
            return dense, bias
        assert self.reader.format is not None, "a quantized weight came through a format"
        qtensor = weight.to(self.device)
        check_finite(self.reader, f"{layer}.{self.reader.format.scale_suffix}", qtensor.scale)
        return qtensor, bias

    def install(
        self, linear: Linear, weight: Weight, bias: Tensor | None, prefix: str, *names: str
    ) -> None:
        """Makes `linear` multiply by `weight`; it stands for the linears `names` under `prefix`."""
        if isinstance(weight, Tensor):
            linear.load_dense(weight, bias)
            return
        try:
            linear.load_quantized(weight, bias, self.dtype, self.activation(prefix + names[0]))
        except (KernelUnavailableError, UnsupportedError) as error:
            raise UnsupportedError(f"{prefix}{' + '.join(names)}: {error}") from error

    def activation(self, layer: str) -> TensorQuant | None:
        """How the inputs of `layer` are quantized, None where they are not."""
        scheme = self.reader.scheme(layer)
        return None if scheme is None else scheme.activation


def _fill_block(block: DecoderBlock, source: _Source, prefix: str, *, merge: bool) -> None:
    attention, mlp = block.self_attn, block.mlp
    norms = [name for name, module in block.named_modules() if isinstance(module, RMSNorm)]
    for name in norms:
        weight = read_tensor(source.reader, f"{prefix}{name}.weight", source.device, source.dtype)
        block.get_submodule(name).weight = _parameter(weight)
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    attention.qkv_proj = _fill_group(block, source, prefix, qkv, merge=merge)
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    mlp.gate_up_proj = _fill_group(block, source, prefix, gate_up, merge=merge)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        _fill_group(block, source, prefix, (name,), merge=False)


def _fill_group(
    block: DecoderBlock, source: _Source, prefix: str, names: tuple[str, ...], *, merge: bool
) -> Linear | None:
    """Fills linears that share an input; returns the one that replaces them when joined."""
    linears: list[Linear] = []
    for name in names:
        linear = block.get_submodule(name)
        assert isinstance(linear, Linear)
        linears.append(linear)
    loaded = [source.linear(prefix, name) for name in names]
    same_input = len({source.activation(prefix + name) for name in names}) == 1
    if not (merge and same_input and joinable([weight for weight, _ in loaded])):
        for name, linear, (weight, bias) in zip(names, linears, loaded, strict=True):
            source.install(linear, weight, bias, prefix, name)
        return None
    sizes = [linear.out_features for linear in linears]
    joined = Linear(linears[0].in_features, sum(sizes))
    weight = join([weight for weight, _ in loaded])
    bias = join_biases([bias for _, bias in loaded], sizes)
    source.install(joined, weight, bias, prefix, *names)
    for name in names:
        parent, _, attribute = name.rpartition(".")
        setattr(block.get_submodule(parent), attribute, None)
    return joined


def _load_head(
    source: _Source, arch: Architecture, config: ModelConfig, embedding: Tensor | None
) -> Linear:
    head = Linear(config.hidden_size, config.vocab_size)
    if config.tie_word_embeddings and not source.reader.is_quantized(arch.lm_head):
        if embedding is None:
            embedding = load_embedding(source.reader, arch, source.device, source.dtype)
        head.load_dense(embedding.detach())
        return head
    weight, bias = source.linear("", arch.lm_head)
    source.install(head, weight, bias, "", arch.lm_head)
    return head


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
