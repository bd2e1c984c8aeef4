"""`import_gguf`: a GGUF file becomes a Hugging Face folder that every command takes as MODEL.

Weights are dequantized tensor by tensor, so memory holds one tensor and one shard's bookkeeping.
llama.cpp rotates neighbouring elements of a head where Hugging Face rotates the two halves, so its
converter interleaves the rows of q and k of Llama models; `unpermute_rows` undoes that. For a head
of 6 rows::

    in the file   0 3 1 4 2 5      imported   0 1 2 3 4 5

V vocabulary, H hidden size, I intermediate size, Q and K rows of all heads and kv heads, D of one.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from quantforge.checkpoint.writer import CheckpointWriter
from quantforge.errors import CheckpointError, UnsupportedError, UsageError
from quantforge.models.gguf_config import (
    ROPE_FREQS,
    Family,
    Metadata,
    config_from_gguf,
    family_of,
)
from quantforge.models.gguf_file import GGUFFile
from quantforge.models.gguf_tokenizer import to_json, token_ids, tokenizer_files
from quantforge.progress import Progress, silent

IMPORT_VERSION = 1
"""Raised whenever the same file is imported differently, so that no cached folder is stale."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

BLOCK_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_output.bias": "self_attn.o_proj.bias",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_gate.bias": "mlp.gate_proj.bias",
    "ffn_up.bias": "mlp.up_proj.bias",
    "ffn_down.bias": "mlp.down_proj.bias",
}
"""Name in a GGUF block -> name in a Hugging Face block."""


def import_gguf(
    path: Path,
    output: Path,
    *,
    dtype: str = "auto",
    overwrite: bool = False,
    progress: Progress = silent,
) -> Path:
    """Writes the model of `path` to the folder `output`, and gives that folder.

    `dtype` is float32, bfloat16, float16 or auto: what the file's matrices are stored in, and
    float32, which is exact, if they are quantized.

    Raises `UnsupportedError` for architectures, vocabularies and scalings that cannot be imported,
    `CheckpointError` for damaged files, `UsageError` for an output that exists already.
    """
    with GGUFFile(Path(path)) as file:
        metadata = Metadata(file)
        family = family_of(metadata)
        weight_dtype = _weight_dtype(file, dtype)
        config = config_from_gguf(file, metadata, str(weight_dtype).removeprefix("torch."))
        shapes = _expected_shapes(file, config, family)
        files = tokenizer_files(metadata, config["max_position_embeddings"])
        ids = token_ids(metadata)
        num_bytes = sum(t.numel() for t in shapes.values()) * weight_dtype.itemsize
        with CheckpointWriter(
            Path(output), overwrite=overwrite, source=file.path, expected_bytes=num_bytes
        ) as writer:
            for done, name in enumerate(shapes):
                tensor = _tensor(file, name, weight_dtype, config, family)
                writer.add(hf_name(name), tensor)
                progress(f"import {file.path.name}", done + 1, len(shapes))
            for filename, content in files.items():
                writer.add_bytes(filename, content)
            writer.add_bytes("generation_config.json", to_json(ids))
            return writer.commit({**config, **ids})


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor. Raises `KeyError` for names of neither kind."""
    whole = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    if name in whole:
        return whole[name]
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{BLOCK_NAMES[rest]}"


def unpermute_rows(tensor: Tensor, num_heads: int) -> Tensor:
    """Undoes the interleaving of each head's two halves in a q or k weight or bias."""
    pairs = tensor.reshape(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def _tensor(
    file: GGUFFile, name: str, dtype: torch.dtype, config: dict[str, Any], family: Family
) -> Tensor:
    tensor = file.tensor(name, dtype)
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(
            f"tensor {name} of {file.path} holds NaN or infinity in {dtype}; if the file is sound, "
            "import it with dtype float32 or bfloat16"
        )
    if family.permuted and ".attn_q." in name:
        return unpermute_rows(tensor, config["num_attention_heads"])
    if family.permuted and ".attn_k." in name:
        return unpermute_rows(tensor, config["num_key_value_heads"])
    return tensor


def _weight_dtype(file: GGUFFile, name: str) -> torch.dtype:
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise UsageError(f"unknown dtype {name!r}; use auto, {', '.join(DTYPES)}")
    stored = {t.type for t in file.tensors.values() if len(t.shape) > 1}
    if stored == {gguf.GGMLQuantizationType.F16}:
        return torch.float16
    if stored == {gguf.GGMLQuantizationType.BF16}:
        return torch.bfloat16
    return torch.float32


def _expected_shapes(
    file: GGUFFile, config: dict[str, Any], family: Family
) -> dict[str, torch.Size]:
    """Shape of every tensor to import, in the order of the model.

    Raises `CheckpointError` for a missing tensor or another shape, `UnsupportedError` for tensors
    beyond those of the architecture, which would change its output.
    """
    expected = dict(_model_shapes(file, config, family))
    for name, shape in expected.items():
        if name not in file.tensors:
            raise CheckpointError(f"{file.path} lacks the tensor {name}")
        if file.tensors[name].shape != shape:
            raise CheckpointError(
                f"tensor {name} of {file.path} has shape {file.tensors[name].shape}; the file's "
                f"metadata asks for {shape}"
            )
    unknown = sorted(set(file.tensors) - set(expected) - {ROPE_FREQS})
    if unknown:
        raise UnsupportedError(
            f"{file.path} holds tensors that a {config['architectures'][0]} does not have: "
            f"{', '.join(unknown[:3])}{' ...' if len(unknown) > 3 else ''}"
        )
    return {name: torch.Size(shape) for name, shape in expected.items()}


def _model_shapes(
    file: GGUFFile, config: dict[str, Any], family: Family
) -> Iterator[tuple[str, tuple[int, ...]]]:
    V, H = config["vocab_size"], config["hidden_size"]
    yield "token_embd.weight", (V, H)
    for layer in range(config["num_hidden_layers"]):
        for name, shape in _block_shapes(config, family).items():
            yield f"blk.{layer}.{name}", shape
    yield "output_norm.weight", (H,)
    if not config["tie_word_embeddings"]:
        yield "output.weight", (V, H)


def _block_shapes(config: dict[str, Any], family: Family) -> dict[str, tuple[int, ...]]:
    H, I, D = config["hidden_size"], config["intermediate_size"], config["head_dim"]  # noqa: E741
    Q, K = config["num_attention_heads"] * D, config["num_key_value_heads"] * D
    weights = {
        "attn_norm": (H,),
        "attn_q": (Q, H),
        "attn_k": (K, H),
        "attn_v": (K, H),
        "attn_output": (H, Q),
        "ffn_norm": (H,),
        "ffn_gate": (I, H),
        "ffn_up": (I, H),
        "ffn_down": (H, I),
    }
    if family.qk_norm:
        weights |= {"attn_q_norm": (D,), "attn_k_norm": (D,)}
    biased: list[str] = []
    if family.qkv_bias or config.get("attention_bias"):
        biased += ["attn_q", "attn_k", "attn_v"]
    if config.get("attention_bias"):
        biased.append("attn_output")
    if config.get("mlp_bias"):
        biased += ["ffn_gate", "ffn_up", "ffn_down"]
    shapes: dict[str, tuple[int, ...]] = {f"{n}.weight": shape for n, shape in weights.items()}
    return shapes | {f"{name}.bias": weights[name][:1] for name in biased}
