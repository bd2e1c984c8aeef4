"""Draws the next token of each row, by noise that depends on nothing but the row's seed.

Temperature first, then top-k, top-p and min-p, each on what the one before left, as transformers
orders them. A draw is ``argmax(scores + gumbel)``: Gumbel noise of token v in a row is made from
``hash(seed, position, v)``, so that a seeded row gives the same token whatever else is in the
batch, and again when it is computed a second time. Temperature 0 takes the largest score, the first
one among equals. A row with a NaN gives token -1.

The hash, in unsigned 32-bit arithmetic, is ``mix(mix(v ^ key_0) ^ key_1)`` with
``mix(x) = x ^= x >> 16; x *= 0x7FEB352D; x ^= x >> 15; x *= 0x846CA68B; x ^= x >> 16``
(Chris Wellons' lowbias32), ``key_0 = mix(mix(seed_low) ^ position)`` and
``key_1 = mix(mix(seed_high + 0x9E3779B9) ^ key_0)``. Its upper 23 bits u give
``-log(-log((u + 0.5) / 2^23))``.

Legend: R rows, V vocabulary.
"""

import torch
from torch import Tensor

from quantforge_kernels.op import Candidate, Op


def reference(
    logits_RV: Tensor,
    temperature_R: Tensor | None,
    top_k_R: Tensor | None,
    top_p_R: Tensor | None,
    min_p_R: Tensor | None,
    seed_R: Tensor | None,
    position_R: Tensor | None,
) -> Tensor:
    """Token ids [R] (int64) for float32 logits.

    `temperature_R` None: every row is greedy, and nothing else is read. A `top_k_R` of 0, a
    `top_p_R` of 1 and a `min_p_R` of 0 restrict nothing; None is that for all rows. `seed_R` and
    `position_R` are int64; the position is that of the token to be drawn.
    """
    greedy_R = logits_RV.argmax(-1)
    tokens_R = greedy_R
    if temperature_R is not None:
        warm = temperature_R > 0
        scores = logits_RV / torch.where(warm, temperature_R, 1.0).unsqueeze(-1)
        scores = restrict(scores, top_k_R, top_p_R, min_p_R)
        scores += gumbel_noise(seed_R, position_R, logits_RV.shape[-1])
        tokens_R = torch.where(warm, scores.argmax(-1), greedy_R)
    largest_R = logits_RV.gather(-1, greedy_R.unsqueeze(-1)).squeeze(-1)  # argmax finds a NaN
    return torch.where(largest_R.isnan(), -1, tokens_R)


def restrict(
    scores_RV: Tensor, top_k_R: Tensor | None, top_p_R: Tensor | None, min_p_R: Tensor | None
) -> Tensor:
    """`scores_RV` with -inf for every token that top-k, top-p or min-p rules out."""
    if top_k_R is not None or top_p_R is not None:
        ordered, order = scores_RV.sort(dim=-1, descending=True, stable=True)
        if top_k_R is not None:
            size = scores_RV.shape[-1]
            last = torch.where(top_k_R > 0, top_k_R, size).clamp(max=size) - 1
            ordered = ordered.masked_fill(
                ordered < ordered.gather(-1, last.unsqueeze(-1)), float("-inf")
            )
        if top_p_R is not None:
            probabilities = ordered.softmax(-1)
            before = probabilities.cumsum(-1) - probabilities
            cut = (before >= top_p_R.unsqueeze(-1)) & (top_p_R < 1).unsqueeze(-1)
            cut[:, 0] = False
            ordered = ordered.masked_fill(cut, float("-inf"))
        scores_RV = torch.empty_like(ordered).scatter_(-1, order, ordered)
    if min_p_R is not None:
        floor = scores_RV.amax(-1, keepdim=True) + min_p_R.log().unsqueeze(-1)
        scores_RV = scores_RV.masked_fill(scores_RV < floor, float("-inf"))
    return scores_RV


def gumbel_noise(seed_R: Tensor, position_R: Tensor, vocab_size: int) -> Tensor:
    """Gumbel noise [R, V] in float32 of each row's seed and position."""
    key_0 = _mix(_mix(_low_bits(seed_R)) ^ _low_bits(position_R))
    key_1 = _mix(_mix(_low_bits((seed_R >> 32) + 0x9E3779B9)) ^ key_0)
    token_V = torch.arange(vocab_size, dtype=torch.int32, device=seed_R.device)
    bits = _mix(_mix(token_V ^ key_0.unsqueeze(-1)) ^ key_1.unsqueeze(-1))
    uniform = (_shift(bits, 9).float() + 0.5) * 2.0**-23
    return uniform.log_().neg_().log_().neg_()


def _low_bits(x: Tensor) -> Tensor:
    """The low 32 bits of int64 values, as int32."""
    return (((x & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).to(torch.int32)


def _shift(x: Tensor, count: int) -> Tensor:
    """`x >> count` of int32 values taken as unsigned."""
    return (x >> count) & ((1 << (32 - count)) - 1)


def _mix(x: Tensor) -> Tensor:
    """lowbias32 of int32 values taken as unsigned; products wrap around."""
    x = x ^ _shift(x, 16)
    x = x * 0x7FEB352D
    x = x ^ _shift(x, 15)
    x = x * (0x846CA68B - (1 << 32))
    return x ^ _shift(x, 16)


OP = Op(name="sample", reference=Candidate(name="reference", run=reference))
