"""The one decoder: config-driven, on flattened tokens, for quantizer and runtime alike.

Nothing here knows of batches or caches. A caller passes an `AttentionBackend`: dense causal
attention for calibration (`models/attention.py`), paged attention in the runtime. Linears are
`Linear` modules whose inner product is set by the loader. On disk and in the quantizer q/k/v and
gate/up are apart; the runtime's loader merges them along N, where `Attention.qkv_proj` and
`MLP.gate_up_proj` take over.

Legend: T tokens (of any number of sequences), D hidden size, H query heads, J key/value heads,
A head dim.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from quantforge_kernels import rms_norm, silu_mul
from quantforge_kernels.op import KernelUnavailableError
from torch import Tensor, nn

from quantforge.errors import UnsupportedError
from quantforge.models.config import ModelConfig
from quantforge.models.kv_scales import KVScales
from quantforge.models.linear import Linear, split_outputs
from quantforge.models.rope import Rope, RotaryEmbedding


class AttentionBackend(Protocol):
    """Rotates queries and keys, keeps keys and values, and attends: one call a layer."""

    def attend(self, layer: int, q_THA: Tensor, k_TJA: Tensor, v_TJA: Tensor, rope: Rope) -> Tensor:
        """Attention output [T, H, A] for queries and keys that are not rotated yet."""


class RMSNorm(nn.Module):
    """``x / rms(x) * weight``, optionally after adding a residual."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps
        self.run: Callable[..., Any] = rms_norm.OP.reference.run

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(normed, sum): `sum` is ``x + residual``, the new residual stream."""
        out: tuple[Tensor, Tensor] = self.run(x, self.weight, self.eps, residual)
        return out


class Attention(nn.Module):
    """Grouped-query attention; q/k/v apart, or merged in `qkv_proj`."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.q_size = config.num_heads * config.head_dim
        self.kv_size = config.num_kv_heads * config.head_dim
        self.q_proj: Linear | None = Linear(config.hidden_size, self.q_size)
        self.k_proj: Linear | None = Linear(config.hidden_size, self.kv_size)
        self.v_proj: Linear | None = Linear(config.hidden_size, self.kv_size)
        self.qkv_proj: Linear | None = None
        self.o_proj = Linear(self.q_size, config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def project(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, H, A], keys [T, J, A] and values [T, J, A]."""
        if self.qkv_proj is not None:
            q, k, v = split_outputs(self.qkv_proj(x_TD), (self.q_size, self.kv_size, self.kv_size))
        else:
            assert self.q_proj is not None
            assert self.k_proj is not None
            assert self.v_proj is not None
            q, k, v = self.q_proj(x_TD), self.k_proj(x_TD), self.v_proj(x_TD)
        tokens = x_TD.shape[0]
        q = q.reshape(tokens, -1, self.head_dim)
        k = k.reshape(tokens, -1, self.head_dim)
        v = v.reshape(tokens, -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q)[0], self.k_norm(k)[0]
        return q, k, v

    def forward(self, x_TD: Tensor, rope: Rope, backend: AttentionBackend) -> Tensor:
        q, k, v = self.project(x_TD)
        attended = backend.attend(self.layer, q, k, v, rope)
        out: Tensor = self.o_proj(attended.reshape(x_TD.shape[0], self.q_size))
        return out


class MLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``; gate/up apart, or merged in `gate_up_proj`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.intermediate_size = config.intermediate_size
        self.gate_proj: Linear | None = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj: Linear | None = Linear(config.hidden_size, config.intermediate_size)
        self.gate_up_proj: Linear | None = None
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)
        self.activate: Callable[..., Any] = silu_mul.OP.reference.run

    def forward(self, x_TD: Tensor) -> Tensor:
        if self.gate_up_proj is not None:
            gate, up = split_outputs(self.gate_up_proj(x_TD), (self.intermediate_size,) * 2)
        else:
            assert self.gate_proj is not None
            assert self.up_proj is not None
            gate, up = self.gate_proj(x_TD), self.up_proj(x_TD)
        activated = self.activate(gate, up)
        del gate, up  # the widest tensors of a block
        out: Tensor = self.down_proj(activated)
        return out


class DecoderBlock(nn.Module):
    """Pre-norm attention and MLP. Input and output are (branch output, residual stream)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x_TD: Tensor, residual_TD: Tensor | None, rope: Rope, backend: AttentionBackend
    ) -> tuple[Tensor, Tensor]:
        """The MLP's output and the residual stream before it; their sum is the hidden state."""
        normed, residual = self.input_layernorm(x_TD, residual_TD)
        attended = self.self_attn(normed, rope, backend)
        normed, residual = self.post_attention_layernorm(attended, residual)
        return self.mlp(normed), residual


def bind_ops(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Chooses the ops of every norm and MLP in `model`; until then they are the references.

    Kernels have no backward pass. Raises `UnsupportedError` with the reason when
    QUANTFORGE_KERNELS forbids what is left.
    """
    problem = {"device": device.type, "dtype": dtype}
    try:
        norm = rms_norm.OP.select(**problem).run
        activate = silu_mul.OP.select(**problem).run
    except KernelUnavailableError as error:
        raise UnsupportedError(str(error)) from error
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.run = norm
        elif isinstance(module, MLP):
            module.activate = activate


class Decoder(nn.Module):
    """Embedding, blocks, final norm and lm_head (the embedding itself when tied).

    `kv_scales` are those that the checkpoint has for a quantized KV cache; backends may use them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Parameter(
            torch.empty(config.vocab_size, config.hidden_size), requires_grad=False
        )
        self.layers = nn.ModuleList(DecoderBlock(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.rotary = RotaryEmbedding(config)
        self.kv_scales: KVScales | None = None

    def bind(self, device: torch.device, dtype: torch.dtype) -> None:
        """Chooses the ops for `device` and `dtype`, as `bind_ops`."""
        bind_ops(self, device, dtype)

    def forward(
        self, token_ids_T: Tensor, positions_T: Tensor, backend: AttentionBackend
    ) -> Tensor:
        """Hidden states [T, D] after the final norm; `logits` turns chosen rows into scores."""
        x = self.embed_tokens[token_ids_T]
        rope = self.rotary(positions_T, x.dtype)
        residual: Tensor | None = None
        for block in self.layers:
            x, residual = block(x, residual, rope, backend)
        normed: Tensor = self.norm(x, residual)[0]
        return normed

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Scores [T, V] in float32."""
        scores: Tensor = self.lm_head(hidden_TD)
        return scores.float()
