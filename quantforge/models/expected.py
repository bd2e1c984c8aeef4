"""Which tensors a checkpoint of a config must hold, and reading one with its values checked."""

import torch
from torch import Tensor

from quantforge.checkpoint.reader import CheckpointReader
from quantforge.errors import CheckpointError, UnsupportedError
from quantforge.models.arch.base import Architecture
from quantforge.models.config import ModelConfig
from quantforge.models.linear import serving_op
from quantforge.models.partition import Partition


def block_linears(config: ModelConfig) -> dict[str, tuple[int, int, bool]]:
    """Each linear of a block: out features, in features, whether it has a bias."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    return {
        "self_attn.q_proj": (q_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, config.o_bias),
        "mlp.gate_proj": (mlp, hidden, config.mlp_bias),
        "mlp.up_proj": (mlp, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, mlp, config.mlp_bias),
    }


def block_tensors(config: ModelConfig) -> frozenset[str]:
    """Names within a block of every tensor that a dense block of `config` has."""
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.qk_norm:
        norms += ["self_attn.q_norm", "self_attn.k_norm"]
    linears = block_linears(config)
    biases = {f"{name}.bias" for name, (*_, has_bias) in linears.items() if has_bias}
    return frozenset({f"{name}.weight" for name in (*norms, *linears)} | biases)


def extra_tensors(
    reader: CheckpointReader, config: ModelConfig, arch: Architecture
) -> tuple[str, ...]:
    """Tensors that lie under a block of `config` and are none of its own.

    Raises `UnsupportedError` for one that has the shape of a linear's weight: a layer that this
    architecture does not have would be left out of the model.
    """
    known = block_tensors(config)
    prefixes = tuple(arch.block_prefix.format(layer=i) for i in range(config.num_layers))
    found = []
    for name in reader.names():
        prefix = next((p for p in prefixes if name.startswith(p)), None)
        if prefix is None or name.removeprefix(prefix) in known:
            continue
        if len(reader.spec(name).shape) >= 2:
            raise UnsupportedError(
                f"{reader.folder}: tensor {name} {list(reader.spec(name).shape)} belongs to no "
                f"layer that {arch.hf_class} has; it would be lost, so this model is not supported"
            )
        found.append(name)
    return tuple(found)


def check_checkpoint(
    reader: CheckpointReader, config: ModelConfig, arch: Architecture, part: Partition
) -> None:
    """Refuses what can be refused without reading a weight.

    Raises `CheckpointError` naming the tensor, `UnsupportedError` for a scheme without a kernel or
    one that `part` cannot cut.
    """
    embedding = (config.vocab_size, config.hidden_size)
    _check_tensor(reader, arch.embedding, embedding)
    _check_tensor(reader, arch.final_norm, (config.hidden_size,))
    if not config.tie_word_embeddings:
        _check_linear(reader, arch.lm_head, embedding, has_bias=False)
    for layer in range(config.num_layers):
        prefix = arch.block_prefix.format(layer=layer)
        check_block(reader, config, prefix)
        for name, (out_features, in_features, _) in block_linears(config).items():
            scheme = reader.scheme(prefix + name)
            if scheme is None:
                continue
            try:
                serving_op(scheme)
            except UnsupportedError as error:
                raise UnsupportedError(f"{prefix}{name}: {error}") from error
            shape = (out_features, in_features)
            reason = scheme.refuse_shape(shape) or part.refuse_scheme(name, shape, scheme)
            if reason is not None:
                raise UnsupportedError(f"{prefix}{name}: {reason}")


def check_block(reader: CheckpointReader, config: ModelConfig, prefix: str) -> None:
    """The tensors of the block under `prefix`: there, and of the shapes that `config` makes."""
    for norm in ("input_layernorm", "post_attention_layernorm"):
        _check_tensor(reader, f"{prefix}{norm}.weight", (config.hidden_size,))
    if config.qk_norm:
        for norm in ("self_attn.q_norm", "self_attn.k_norm"):
            _check_tensor(reader, f"{prefix}{norm}.weight", (config.head_dim,))
    for name, (out_features, in_features, has_bias) in block_linears(config).items():
        _check_linear(reader, prefix + name, (out_features, in_features), has_bias=has_bias)


def _check_linear(
    reader: CheckpointReader, layer: str, shape: tuple[int, int], *, has_bias: bool
) -> None:
    scheme = reader.scheme(layer)
    if scheme is None or reader.format is None:
        _check_tensor(reader, f"{layer}.weight", shape)
    else:
        stored = reader.format.tensors(shape, scheme, torch.float32)
        for suffix, spec in stored.items():
            _check_shape(reader, f"{layer}.{suffix}", spec.shape)
    if has_bias:
        _check_tensor(reader, f"{layer}.bias", shape[:1])
    elif f"{layer}.bias" in reader and not (
        scheme is not None and _is_zero_bias(reader, layer, shape[0])
    ):
        raise CheckpointError(
            f"{reader.folder}: tensor {layer}.bias is there, but config.json says no bias"
        )


def _is_zero_bias(reader: CheckpointReader, layer: str, out_features: int) -> bool:
    """Old GPTQ files give every linear a bias; where the model has none it is zero."""
    name = f"{layer}.bias"
    return reader.spec(name).shape == (out_features,) and not bool(reader.tensor(name).any())


def _check_tensor(reader: CheckpointReader, name: str, shape: tuple[int, ...]) -> None:
    _check_shape(reader, name, shape)
    dtype = reader.spec(name).dtype
    if not dtype.is_floating_point:
        raise CheckpointError(f"{reader.folder}: tensor {name} is {dtype}, not floating point")


def _check_shape(reader: CheckpointReader, name: str, shape: tuple[int, ...]) -> None:
    if name not in reader:
        raise CheckpointError(f"{reader.folder}: tensor {name} is missing")
    stored = reader.spec(name).shape
    if stored != shape:
        raise CheckpointError(
            f"{reader.folder}: tensor {name} has shape {list(stored)}, "
            f"config.json makes it {list(shape)}"
        )


def read_tensor(
    reader: CheckpointReader, name: str, device: torch.device | str, dtype: torch.dtype
) -> Tensor:
    """The dense tensor `name` on `device` in `dtype`, free of NaN and infinity."""
    if name not in reader:
        raise CheckpointError(f"{reader.folder}: tensor {name} is missing")
    tensor = reader.tensor(name).to(device, dtype)
    check_finite(reader, name, tensor)
    return tensor


def check_finite(reader: CheckpointReader, name: str, tensor: Tensor) -> None:
    """One pass without a copy: a sum is finite unless something in it is not, or it overflowed."""
    if bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all()):
        return
    bad = int((~tensor.isfinite()).sum())
    raise CheckpointError(
        f"{reader.folder}: tensor {name} holds {bad} values that are NaN or infinite "
        f"in {tensor.dtype}"
    )
