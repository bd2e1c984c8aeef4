"""From a GGUF file's metadata to the config.json of the Hugging Face model it was made from.

`D` is the head dimension; sizes are in elements, lengths in tokens.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from quantforge.errors import CheckpointError, UnsupportedError
from quantforge.models.gguf_file import GGUFFile


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """What a GGUF architecture is called by Hugging Face, and how its tensors differ."""

    hf_class: str
    permuted: bool = False
    """Whether llama.cpp's converter permutes the rows of q and k."""
    qkv_bias: bool = False
    qk_norm: bool = False


FAMILIES = {
    "llama": Family(hf_class="LlamaForCausalLM", permuted=True),
    "qwen2": Family(hf_class="Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family(hf_class="Qwen3ForCausalLM", qk_norm=True),
}
"""GGUF architecture -> family. Mistral models come as ``llama``, whose tensors they share."""

LLAMA3_LOW_FREQ_FACTOR, LLAMA3_HIGH_FREQ_FACTOR = 1.0, 4.0
LLAMA3_ORIGINAL_LENGTH = 8192
"""The same in every Llama 3 that was released."""

ROPE_FREQS = "rope_freqs.weight"


class Metadata:
    """Typed access to a file's metadata; `{arch}` in a name stands for the architecture."""

    def __init__(self, file: GGUFFile) -> None:
        self.path = file.path
        self._values = file.metadata
        self.architecture = self._values.get("general.architecture")

    def get(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The value, or `default`. Raises `CheckpointError` for a value of another type."""
        key = name.format(arch=self.architecture)
        value = self._values.get(key, default)
        if value is default:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise CheckpointError(f"{self.path}: metadata {key} is {value!r}, a wrong type")
        return value

    def require(self, name: str, kind: type | tuple[type, ...]) -> Any:
        """The value. Raises `CheckpointError` if it is missing."""
        value = self.get(name, kind)
        if value is None:
            key = name.format(arch=self.architecture)
            raise CheckpointError(f"{self.path} lacks the metadata {key}")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """A size above 0; files that give one a layer must give equal ones."""
        value = self.get(name, (int, list), default)
        sizes = set(value) if isinstance(value, list) else {value}
        size = sizes.pop() if sizes else None
        key = name.format(arch=self.architecture)
        if sizes:
            raise UnsupportedError(f"{self.path}: {key} differs from layer to layer: {value}")
        if not isinstance(size, int) or size < 1:
            raise CheckpointError(f"{self.path}: metadata {key} must be above 0, not {size!r}")
        return size

    def names(self, prefix: str) -> list[str]:
        prefix = prefix.format(arch=self.architecture)
        return [name for name in self._values if name.startswith(prefix)]


def family_of(metadata: Metadata) -> Family:
    """The family of a file. Raises `UnsupportedError` listing those that can be imported."""
    architecture = metadata.architecture
    if architecture not in FAMILIES:
        raise UnsupportedError(
            f"{metadata.path} holds the architecture {architecture!r}; GGUF import knows "
            f"{', '.join(FAMILIES)}"
        )
    if metadata.get("split.count", int, 1) > 1:
        raise UnsupportedError(
            f"{metadata.path} is one part of several; join them with llama-gguf-split --merge"
        )
    if metadata.get("{arch}.expert_count", int, 0):
        raise UnsupportedError(f"{metadata.path} is a mixture of experts, which is not supported")
    return FAMILIES[architecture]


def config_from_gguf(file: GGUFFile, metadata: Metadata, dtype: str) -> dict[str, Any]:
    """The config.json of `file`, without its token ids; `dtype` is the weights' name."""
    family = family_of(metadata)
    heads = metadata.size("{arch}.attention.head_count")
    hidden = metadata.size("{arch}.embedding_length")
    head_dim = metadata.size("{arch}.attention.key_length", hidden // heads)
    _check_heads(metadata, head_dim)
    context = metadata.size("{arch}.context_length")
    theta = _shortest(metadata.get("{arch}.rope.freq_base", float, 10000.0))
    config = {
        "architectures": [family.hf_class],
        "model_type": metadata.architecture,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": metadata.size("{arch}.feed_forward_length"),
        "num_hidden_layers": metadata.size("{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.size("{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": _shortest(
            metadata.require("{arch}.attention.layer_norm_rms_epsilon", float)
        ),
        "rope_theta": theta,
        "rope_scaling": rope_scaling_from_gguf(file, metadata, theta, head_dim, context),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": dtype,
    }
    if family.permuted:  # Llama's config says whether its layers have biases
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors
    elif family.qk_norm:
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    return config


def _check_heads(metadata: Metadata, head_dim: int) -> None:
    for name in ("{arch}.attention.value_length", "{arch}.rope.dimension_count"):
        size = metadata.size(name, head_dim)
        if size != head_dim:
            raise UnsupportedError(
                f"{metadata.path}: {name.format(arch=metadata.architecture)} is {size}; only heads "
                f"that are {head_dim} long throughout are supported"
            )


def _vocab_size(file: GGUFFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path} lacks the tensor token_embd.weight")
    return file.tensors["token_embd.weight"].shape[0]


def _shortest(value: float) -> float:
    """The decimal that a float32 was most likely written from: 1e-05, not 9.99999974e-06."""
    return float(str(np.float32(value)))


def rope_scaling_from_gguf(
    file: GGUFFile, metadata: Metadata, theta: float, head_dim: int, context: int
) -> dict[str, Any] | None:
    """config.json's ``rope_scaling``, or None. Raises `UnsupportedError` for other kinds."""
    if ROPE_FREQS in file.tensors:
        return _llama3_scaling(file, metadata, theta, head_dim, context)
    kind = metadata.get("{arch}.rope.scaling.type", str, "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedError(
            f"{metadata.path}: rope scaling {kind!r}; GGUF import knows none, linear, yarn, llama3"
        )
    factor = _shortest(metadata.require("{arch}.rope.scaling.factor", float))
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": metadata.size(
            "{arch}.rope.scaling.original_context_length", context
        ),
        **_yarn_options(metadata, factor),
    }


def _yarn_options(metadata: Metadata, factor: float) -> dict[str, float]:
    """What a file says of YaRN beyond its factor, in Hugging Face's names."""
    prefix = "{arch}.rope.scaling."
    names = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
    known = {"type", "factor", "original_context_length", "finetuned", "attn_factor", *names}
    for name in metadata.names(prefix):
        if name.rsplit(".", 1)[1] not in known:
            raise UnsupportedError(f"{metadata.path}: the YaRN option {name} is not supported")
    found = {hf: metadata.get(prefix + name, float) for name, hf in names.items()}
    options = {name: _shortest(value) for name, value in found.items() if value is not None}
    attention = metadata.get(prefix + "attn_factor", float)
    if attention is not None and attention != 1.0:  # llama.cpp's factor comes on top of YaRN's own
        options["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    return options


def _llama3_scaling(
    file: GGUFFile, metadata: Metadata, theta: float, head_dim: int, context: int
) -> dict[str, Any]:
    """Finds the parameters that give the divisors of ``rope_freqs.weight``.

    A GGUF file keeps only the divisors, one a frequency: 1 for short waves, the factor for long
    ones, and a blend between. Known lengths are tried until one reproduces them.
    """
    import torch

    divisors_D = file.tensor(ROPE_FREQS, torch.float32).flatten().numpy()
    stored = metadata.get("{arch}.rope.scaling.original_context_length", int)
    factor = _shortest(float(divisors_D.max()))
    for original in filter(None, (stored, LLAMA3_ORIGINAL_LENGTH, context)):
        parameters = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": LLAMA3_LOW_FREQ_FACTOR,
            "high_freq_factor": LLAMA3_HIGH_FREQ_FACTOR,
            "original_max_position_embeddings": original,
        }
        expected_D = llama3_divisors(parameters, theta, head_dim)
        if expected_D.shape == divisors_D.shape and np.allclose(divisors_D, expected_D, rtol=1e-4):
            return parameters
    raise UnsupportedError(
        f"{file.path}: {ROPE_FREQS} is not Llama 3's rope scaling (divisors up to {factor})"
    )


def llama3_divisors(
    parameters: Mapping[str, Any], theta: float, head_dim: int
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """By what Llama 3 divides each frequency, [D / 2], from its ``rope_scaling``."""
    factor, original = parameters["factor"], parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    wave_length = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    share = np.clip((original / wave_length - low) / (high - low), 0.0, 1.0)
    divisors: np.ndarray[Any, np.dtype[np.float64]] = 1 / ((1 - share) / factor + share)
    return divisors
