"""Chooses the next token of every request of a step, through the `sample` op.

Legend: R requests that get a token, V vocabulary.
"""

from collections.abc import Sequence

import torch
from quantforge_kernels import sample
from quantforge_kernels.op import KernelUnavailableError
from torch import Tensor

from quantforge.errors import UnsupportedError
from quantforge.runtime.packing import to_device
from quantforge.runtime.request import Request, TokenLogprob

NO_TOKEN = -1
"""What the op gives for a row whose scores hold NaN."""


class Sampler:
    """The `sample` op as chosen for a device; holds no state between steps."""

    def __init__(self, device: torch.device, vocab_size: int) -> None:
        self.device = device
        try:
            self.op = sample.OP.select(device=device.type, vocab_size=vocab_size)
        except KernelUnavailableError as error:
            raise UnsupportedError(str(error)) from error

    def __call__(
        self, logits_RV: Tensor, requests: Sequence[Request]
    ) -> list[tuple[int, TokenLogprob | None]]:
        """A token (`NO_TOKEN` for a row of NaN) for each request, with its log probability where
        asked for. Waits for the device once."""
        tokens_R = self._draw(logits_RV, requests)
        wanted = [
            row for row, request in enumerate(requests) if request.params.logprobs is not None
        ]
        if not wanted:
            return [(token, None) for token in tokens_R.tolist()]
        most = max(requests[row].params.logprobs or 0 for row in wanted)
        rows = torch.tensor(wanted, device=self.device)
        chosen, values, ids = token_logprobs(logits_RV[rows], tokens_R[rows], most)
        tokens = tokens_R.tolist()
        found: dict[int, TokenLogprob] = {}
        columns = zip(wanted, chosen.tolist(), values.tolist(), ids.tolist(), strict=True)
        for row, own, likeliest, likeliest_ids in columns:
            count = requests[row].params.logprobs or 0
            top = tuple(zip(likeliest_ids[:count], likeliest[:count], strict=True))
            found[row] = TokenLogprob(tokens[row], own, top)
        return [(token, found.get(row)) for row, token in enumerate(tokens)]

    def _draw(self, logits_RV: Tensor, requests: Sequence[Request]) -> Tensor:
        params = [request.params for request in requests]
        if all(p.temperature == 0 for p in params):
            greedy: Tensor = self.op.run(logits_RV, None, None, None, None, None, None)
            return greedy

        top_k = [max(p.top_k, 0) for p in params]
        top_p = [p.top_p for p in params]
        min_p = [p.min_p for p in params]
        columns = [
            (torch.float32, [p.temperature for p in params]),
            (torch.int64, top_k),
            (torch.float32, top_p),
            (torch.float32, min_p),
            (torch.int64, [request.seed for request in requests]),
            (torch.int64, [request.num_generated for request in requests]),
        ]
        temperature_R, top_k_R, top_p_R, min_p_R, seed_R, position_R = to_device(
            columns, self.device
        )
        drawn: Tensor = self.op.run(
            logits_RV,
            temperature_R,
            top_k_R if any(top_k) else None,
            top_p_R if min(top_p) < 1 else None,
            min_p_R if any(min_p) else None,
            seed_R,
            position_R,
        )
        return drawn


def token_logprobs(
    logits_RV: Tensor, token_ids_R: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Natural log probabilities: of `token_ids_R` [R], and of the `count` likeliest with their ids
    [R, count]."""
    normaliser_R1 = logits_RV.logsumexp(-1, keepdim=True)
    chosen_R1 = logits_RV.gather(-1, token_ids_R.clamp(min=0).unsqueeze(-1)) - normaliser_R1
    values, ids = logits_RV.topk(min(count, logits_RV.shape[-1]), dim=-1)
    return chosen_R1.squeeze(-1), values - normaliser_R1, ids
