"""Decoders of well-known shapes with random weights made on the device, for timing without a file.

Weights are scaled so that activations keep their size from layer to layer: nothing overflows, and
kernels see the numbers of an ordinary model. The text that such a model writes means nothing.

Legend: N out features, K in features.
"""

import math
from dataclasses import replace

import torch
from quantforge_kernels.op import KernelUnavailableError
from torch import Tensor, nn

from quantforge.errors import UnsupportedError, UsageError
from quantforge.models.config import ModelConfig, RopeConfig
from quantforge.models.decoder import Decoder, DecoderBlock, RMSNorm
from quantforge.models.linear import Linear
from quantforge.qtensor import QuantizedTensor, quantize
from quantforge.schemes import QuantScheme, TensorQuant

_LLAMA3_ROPE = RopeConfig(
    theta=500000.0,
    kind="llama3",
    parameters={
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
)


def _llama3(hidden: int, intermediate: int, layers: int, heads: int) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope=_LLAMA3_ROPE,
        tie_word_embeddings=False,
    )


SHAPES = {
    "llama-3.1-8b": _llama3(4096, 14336, 32, 32),
    "llama-3.1-70b": _llama3(8192, 28672, 80, 64),
    "qwen3-8b": ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1000000.0),
        tie_word_embeddings=False,
        qk_norm=True,
    ),
    "smollm2-135m": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=100000.0),
        tie_word_embeddings=True,
    ),
}
"""Sizes by name, as the models' own config.json files give them."""


def shape_named(name: str) -> ModelConfig:
    """The sizes called `name`. Raises `UsageError` that lists the names."""
    if name not in SHAPES:
        raise UsageError(f"unknown model shape {name!r}; known: {', '.join(SHAPES)}")
    return SHAPES[name]


def synthetic_decoder(
    config: ModelConfig,
    scheme: QuantScheme | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    lm_head: QuantScheme | None = None,
    seed: int = 0,
) -> Decoder:
    """A decoder as the runtime's loader builds it, q/k/v and gate/up joined, with random weights.

    `scheme` is that of the blocks' linears, `lm_head` that of the lm_head; None is dense in
    `dtype`. Raises `UnsupportedError` for a scheme that no kernel here can run.
    """
    with torch.device("meta"):
        decoder = Decoder(config)
    make = _Maker(device, dtype, seed)
    hidden, attended = config.hidden_size, config.num_heads * config.head_dim
    merged = attended + 2 * config.num_kv_heads * config.head_dim
    decoder.embed_tokens = nn.Parameter(
        make.normal((config.vocab_size, hidden), 1.0), requires_grad=False
    )
    for block in decoder.layers:
        assert isinstance(block, DecoderBlock)
        attention, mlp = block.self_attn, block.mlp
        attention.q_proj = attention.k_proj = attention.v_proj = None
        mlp.gate_proj = mlp.up_proj = None
        attention.qkv_proj = make.linear(merged, hidden, scheme, bias=config.qkv_bias)
        attention.o_proj = make.linear(hidden, attended, scheme, bias=config.o_bias)
        mlp.gate_up_proj = make.linear(
            2 * config.intermediate_size, hidden, scheme, bias=config.mlp_bias
        )
        mlp.down_proj = make.linear(hidden, config.intermediate_size, scheme, bias=config.mlp_bias)
    for module in decoder.modules():
        if isinstance(module, RMSNorm):
            ones = torch.ones(module.weight.shape, device=device, dtype=dtype)
            module.weight = nn.Parameter(ones, requires_grad=False)
    if config.tie_word_embeddings and lm_head is None:
        decoder.lm_head.load_dense(decoder.embed_tokens.detach())
    else:
        decoder.lm_head = make.linear(config.vocab_size, hidden, lm_head, bias=False)
    decoder.bind(device, dtype)
    return decoder


class _Maker:
    """Random tensors on a device from one generator."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, shape: tuple[int, ...], std: float) -> Tensor:
        drawn = torch.empty(shape, device=self.device, dtype=self.dtype)
        return drawn.normal_(0, std, generator=self.generator)

    def linear(self, n: int, k: int, scheme: QuantScheme | None, *, bias: bool) -> Linear:
        """Outputs as large as inputs, on average."""
        linear = Linear(k, n)
        bias_N = self.normal((n,), 0.1) if bias else None
        if scheme is None:
            linear.load_dense(self.normal((n, k), k**-0.5), bias_N)
            return linear
        if (reason := scheme.refuse_shape((n, k))) is not None:
            raise UnsupportedError(f"a linear of {n} outputs and {k} inputs: {reason}")
        try:
            qtensor = self.qtensor(scheme.weight, n, k)
            if scheme.has_static_inputs:  # inputs of about 1: the largest code at 8
                code_max = 448.0 if scheme.weight.dtype == "float" else 127.0
                scale = torch.full((1,), 8 / code_max, device=self.device, dtype=self.dtype)
                qtensor = replace(qtensor, input_scale=scale)
            linear.load_quantized(qtensor, bias_N, self.dtype, scheme.activation)
        except KernelUnavailableError as error:
            raise UnsupportedError(str(error)) from error
        return linear

    def qtensor(self, quant: TensorQuant, n: int, k: int) -> QuantizedTensor:
        if quant.num_bits < 4 or quant.code_type == "float4":  # slower: drawn, then rounded
            return quantize(self.normal((n, k), 1 / math.sqrt(k)), quant, scale_dtype=self.dtype)
        if quant.dtype == "float":
            codes = self.normal((n, k), 64.0).clamp(-448, 448).to(torch.float8_e4m3fn)
            scale = torch.full(self._scale_shape(quant, n, k), 1 / (64 * math.sqrt(k)))
            return QuantizedTensor(
                codes=codes,
                scale=scale.to(self.device, self.dtype),
                zero_point=None,
                quant=quant,
            )
        low, high = quant.code_range
        shape = self._scale_shape(quant, n, k)
        codes = self._integers(low, high, (n, k))
        spread = math.sqrt(((high - low + 1) ** 2 - 1) / 12)
        scale = torch.full(shape, 1 / (spread * math.sqrt(k)), device=self.device, dtype=self.dtype)
        return QuantizedTensor(
            codes=codes,
            scale=scale,
            zero_point=None if quant.symmetric else self._integers(-1, 1, shape),
            quant=quant,
        )

    def _integers(self, low: int, high: int, shape: tuple[int, int]) -> Tensor:
        drawn = torch.empty(shape, device=self.device, dtype=torch.int8)
        return drawn.random_(low, high + 1, generator=self.generator)

    @staticmethod
    def _scale_shape(quant: TensorQuant, n: int, k: int) -> tuple[int, int]:
        if quant.block_shape is not None:
            return -(-n // quant.block_shape[0]), -(-k // quant.block_shape[1])
        return (1, 1) if quant.granularity == "tensor" else (n, quant.num_groups(k))
