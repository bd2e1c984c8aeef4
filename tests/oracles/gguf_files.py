"""Writes tiny GGUF files from Hugging Face folders, as llama.cpp's converter lays them out."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp does to the q and k of Llama models."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))


def write_gguf(
    path: Path,
    folder: Path,
    *,
    arch: str,
    pre: str = "gpt-2",
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    token_types: Mapping[int, int] | None = None,
) -> Path:
    """`path`, a GGUF of the model in `folder`; matrices are stored as `quantization`.

    `metadata` holds further string, integer, float or bool entries, `extra` further tensors.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, arch)
    _add_sizes(writer, config)
    _add_vocabulary(writer, folder, pre, token_types or {})
    for name, value in (metadata or {}).items():
        add = {bool: writer.add_bool, str: writer.add_string, float: writer.add_float32}
        add.get(type(value), writer.add_uint32)(name, value)
    for name, tensor in {**_tensors(folder, config, arch), **(extra or {})}.items():
        stored = tensor.astype(np.float32)
        if tensor.ndim == 2 and quantization != gguf.GGMLQuantizationType.F32:
            data = gguf.quantize(stored, quantization)
            writer.add_tensor(name, data, raw_dtype=quantization)
        else:
            writer.add_tensor(name, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])


def _add_vocabulary(
    writer: gguf.GGUFWriter, folder: Path, pre: str, types: Mapping[int, int]
) -> None:
    definition = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    ids = dict(definition["model"]["vocab"])
    kinds = {}
    for token in definition["added_tokens"]:
        ids[token["content"]] = token["id"]
        kinds[token["id"]] = 3 if token["special"] else 4
    tokens = [token for token, _ in sorted(ids.items(), key=lambda item: item[1])]
    kinds |= types
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(i, 1) for i in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in definition["model"]["merges"]])
    writer.add_bos_token_id(ids[settings["bos_token"]])
    writer.add_eos_token_id(ids[settings["eos_token"]])
    writer.add_pad_token_id(ids[settings["pad_token"]])
    if "chat_template" in settings:
        writer.add_chat_template(settings["chat_template"])


def _tensors(folder: Path, config: dict[str, Any], arch: str) -> dict[str, np.ndarray]:
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name in whole:
            tensors[whole[name]] = tensor
            continue
        _, _, layer, *middle, kind = name.split(".")
        if arch == "llama" and middle[-1] in heads:
            tensor = permute(tensor, heads[middle[-1]])
        tensors[f"blk.{layer}.{BLOCK_NAMES['.'.join(middle)]}.{kind}"] = tensor
    return tensors
