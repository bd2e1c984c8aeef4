"""Dense causal attention for whole sequences of one length: calibration and plain scoring."""

import torch.nn.functional as F
from quantforge_kernels import rope as rope_op
from torch import Tensor

from quantforge.models.config import ModelConfig
from quantforge.models.rope import Rope


class CausalAttention:
    """An `AttentionBackend` over `num_sequences` full sequences laid end to end, nothing cached."""

    def __init__(self, config: ModelConfig, num_sequences: int) -> None:
        self.config = config
        self.num_sequences = num_sequences

    def attend(self, layer: int, q_THA: Tensor, k_TJA: Tensor, v_TJA: Tensor, rope: Rope) -> Tensor:
        q, k = rope_op.OP.reference.run(q_THA, k_TJA, rope.cos, rope.sin)

        def heads_first(x: Tensor) -> Tensor:
            return x.reshape(self.num_sequences, -1, *x.shape[1:]).transpose(1, 2)

        length = q.shape[0] // self.num_sequences
        window = self.config.window(layer)
        mask = None
        if window is not None and window < length:
            mask = q.new_ones((length, length)).tril().triu(1 - window).bool()
        out = F.scaled_dot_product_attention(
            heads_first(q),
            heads_first(k),
            heads_first(v_TJA),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=self.config.num_heads != self.config.num_kv_heads,
        )
        return out.transpose(1, 2).reshape(q_THA.shape)
