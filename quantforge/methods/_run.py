"""Runs a method on a block, whatever calibration saw of it, and completes its reports.

Linears whose input saw no token of the calibration text are beyond a method that learns from text:
they are rounded to nearest, after the method has moved its scales, and their reports say why.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from quantforge.calibration.capture import InputStatistics
from quantforge.methods import rtn
from quantforge.methods.base import BlockResult, BlockTask, LayerReport, Method

NO_TOKENS = "rtn: no token of the calibration text reached its input"


def run_method(
    method: Method,
    task: BlockTask,
    options: Any,
    rounding: Callable[[], BlockResult] | None = None,
) -> BlockResult:
    """The block quantized by `method`, and by `rtn` where it has nothing to go by.

    `rounding` does the method's work where that is done group by group, with passes between.
    As the method, it may replace weights and norms of `task`. The reports get the facts about each
    input, and the method's time, shared by the number of weights where it did not measure its own.
    """
    started = _now(task)
    result = _quantize(method, task, options) if rounding is None else rounding()
    elapsed = _now(task) - started
    total = sum(task.weights[name].numel() for name in result.qtensors)
    group_of = {member: g.name for g in task.groups for member in g.members}
    reports = []
    for report in result.reports:
        share = elapsed * task.weights[report.name].numel() / total
        seconds = share if report.seconds is None else report.seconds
        group = group_of[report.name]
        if group in task.statistics:
            report = _with_input(report, group, task.statistics[group])
        else:
            unseen = 0 if method.needs_statistics else None
            report = replace(report, input_group=group, num_tokens=unseen)
        reports.append(replace(report, seconds=round(seconds, 4)))
    return BlockResult(qtensors=result.qtensors, reports=tuple(reports))


def _quantize(method: Method, task: BlockTask, options: Any) -> BlockResult:
    if not method.needs_statistics:
        return method.quantize_block(task, options)
    seen = tuple(g for g in task.groups if g.name in task.statistics)
    unseen = tuple(g for g in task.groups if g.name not in task.statistics)
    if not unseen:
        return method.quantize_block(task, options)
    result = _part(method, task, seen, options) if seen else BlockResult(qtensors={}, reports=())
    rest = _part(rtn.METHOD, task, unseen, rtn.RtnOptions())
    fallen = (replace(r, notes={**r.notes, "fallback": NO_TOKENS}) for r in rest.reports)
    qtensors = result.qtensors | rest.qtensors
    return BlockResult(
        qtensors={name: qtensors[name] for name in task.quant},
        reports=_in_order(task, (*result.reports, *fallen)),
    )


def _part(method: Method, task: BlockTask, groups: tuple[Any, ...], options: Any) -> BlockResult:
    """`method` on the linears of `groups`; weights and norms are those of `task` itself."""
    members = {member for group in groups for member in group.members}
    quant = {name: q for name, q in task.quant.items() if name in members}
    if not quant:
        return BlockResult(qtensors={}, reports=())
    return method.quantize_block(replace(task, groups=groups, quant=quant), options)


def _in_order(task: BlockTask, reports: tuple[LayerReport, ...]) -> tuple[LayerReport, ...]:
    places = {name: i for i, name in enumerate(task.quant)}
    return tuple(sorted(reports, key=lambda report: places[report.name]))


def _with_input(report: LayerReport, group: str, found: InputStatistics) -> LayerReport:
    """`report` with what is known of the input that its linear reads."""
    channel = int(found.absmax.argmax())
    median = float(found.absmax.median())
    return replace(
        report,
        input_group=group,
        num_tokens=found.num_tokens,
        outlier_channel=channel,
        outlier_ratio=float(found.absmax[channel]) / median if median > 0 else None,
    )


def _now(task: BlockTask) -> float:
    """Seconds, with the work behind the task's tensors done."""
    device = next(iter(task.weights.values())).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
