"""Blocks of tiny models as methods see them, with inputs recorded from transformers."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantforge.calibration.capture import InputStatistics
from quantforge.checkpoint.reader import CheckpointReader
from quantforge.methods.base import BlockTask
from quantforge.models.loader import architecture_of, load_config
from quantforge.schemes import TensorQuant

G32_ASYM = TensorQuant(num_bits=4, symmetric=False, granularity="group", group_size=32)


@dataclass(frozen=True, kw_only=True)
class RecordedBlock:
    """A task and the inputs [tokens, K] of its groups that its statistics were taken of."""

    task: BlockTask
    inputs: dict[str, Tensor]
    model: Any


def statistics_of(x_MK: Tensor, diagonal: bool) -> InputStatistics:
    """By the definition, in float64."""
    wide = x_MK.double()
    gram = wide.T @ wide / len(wide)
    return InputStatistics(
        second_moment=(gram.diagonal() if diagonal else gram).float().contiguous(),
        mean_abs=wide.abs().mean(0).float(),
        absmax=wide.abs().amax(0).float(),
        num_tokens=len(wide),
    )


def record_inputs(model: Any, modules: dict[str, str], token_ids: Tensor) -> dict[str, Tensor]:
    """What each of `modules` (name -> path in `model`) reads, by transformers' forward."""
    seen: dict[str, list[Tensor]] = {name: [] for name in modules}

    def keep(name: str) -> Callable[..., None]:
        return lambda _module, inputs: seen[name].append(inputs[0].detach().flatten(0, 1))

    handles = [
        model.get_submodule(path).register_forward_pre_hook(keep(name))
        for name, path in modules.items()
    ]
    with torch.no_grad():
        model(token_ids)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts) for name, parts in seen.items()}


@pytest.fixture
def record_block(reference_model: Callable[..., Any]) -> Callable[..., RecordedBlock]:
    """``record_block(folder, quant=..., diagonal=False, outliers=True)``: block 0.

    With `outliers` a few channels of both norms are large, as in trained models.
    """

    def make(
        folder: Path,
        *,
        quant: TensorQuant = G32_ASYM,
        diagonal: bool = False,
        outliers: bool = True,
        scale_dtype: torch.dtype = torch.float32,
    ) -> RecordedBlock:
        model = reference_model(folder)
        reader = CheckpointReader(folder)
        arch, config = architecture_of(reader.config), load_config(reader.config)
        block = model.model.layers[0]
        if outliers:
            for norm in (block.input_layernorm, block.post_attention_layernorm):
                norm.weight.data[::13] *= 10
        generator = torch.Generator().manual_seed(1)
        token_ids = torch.randint(3, config.vocab_size, (4, 48), generator=generator)
        paths = {g.name: f"model.layers.0.{g.members[0]}" for g in arch.input_groups}
        inputs = record_inputs(model, paths, token_ids)
        state = {n: p.detach().clone() for n, p in block.named_parameters()}
        members = [member for g in arch.input_groups for member in g.members]
        task = BlockTask(
            layer=0,
            config=config,
            groups=arch.input_groups,
            weights={m: state[f"{m}.weight"] for m in members},
            biases={m: state[f"{m}.bias"] for m in members if f"{m}.bias" in state},
            norms={
                n.removesuffix(".weight"): p for n, p in state.items() if n.endswith("norm.weight")
            },
            quant=dict.fromkeys(members, quant),
            statistics={name: statistics_of(x, diagonal) for name, x in inputs.items()},
            scale_dtype=scale_dtype,
        )
        return RecordedBlock(task=task, inputs=inputs, model=model)

    return make
