"""The best of all roundings, linear by linear, by the output error on samples held out.

Candidates are rounding to nearest, AWQ's clipped ranges (Lin et al., arXiv 2306.00978), GPTQ's
codes on either grid (Frantar et al., arXiv 2210.17323), each with or without AWQ's scales; with
`mismatch` also GPTQ on weights that make up for earlier layers' errors (GPTAQ, Li et al., arXiv
2504.02692; Qronos, Zhang et al., arXiv 2505.11695), and with `refit` with scales fitted again.

A scale belongs to all linears of an input group. It is kept where no linear ends above rounding to
nearest without it, so none is worse than rounding to nearest on the held-out samples. That the
group's own error falls is not asked for: scales protect what later layers need, and a model whose
groups kept them only then ended at KL 0.138 where `awq_gptq` has 0.096 (SmolLM2-135M, 16 x 512
tokens), though its layers had lower errors. Groups are decided from the last to the first: a scale
that a linear absorbs changes that linear's rows, which must be settled before its own candidates
are compared.

Legend: N out features, K in features.
"""

from dataclasses import dataclass, field, replace

from quantforge.methods._candidates import (
    Candidate,
    GridOf,
    clip_measure,
    column_candidates,
    held_out_errors,
    relative_to,
)
from quantforge.methods._factor import factorise
from quantforge.methods.awq import ScaleChoice, group_scale, move_scale, round_nearest, scale_notes
from quantforge.methods.awq_gptq import AwqGptqOptions
from quantforge.methods.base import BlockResult, BlockTask, Method, Needs, join_results
from quantforge.methods.gptq import check_moment, report
from quantforge.models.arch.base import InputGroup
from quantforge.qtensor import quantize


@dataclass(frozen=True, kw_only=True, slots=True)
class BestOptions(AwqGptqOptions):
    """The options of `awq_gptq`; without `scale` or `clip` candidates that have them are left out,
    `clip_by` says on which grid `mismatch` and `refit` are tried."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Settled:
    """The best candidate of one linear, its error on the held-out samples, and those of all."""

    candidate: Candidate
    error: float
    errors: dict[str, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """By input group: the scale that was kept, and the roundings that go with it."""

    choices: dict[str, ScaleChoice] = field(default_factory=dict)
    results: dict[str, BlockResult] = field(default_factory=dict)


def needs(options: BestOptions) -> Needs:
    """Held-out samples always; the rest as the options say."""
    return replace(options.rounding.needs, held_out=options.held_out)


def quantize_block(task: BlockTask, options: BestOptions) -> BlockResult:
    """Every linear under its best rounding; scales that are kept move in place in `task`.

    Raises `CalibrationError` where a group's statistics are diagonal, not finite, or were taken
    without held-out samples.
    """
    prepared = prepare(task, options)
    if options.mismatch:
        return join_results(round_group(task, g, options, prepared) for g in task.groups)
    return join_results(prepared.results[group.name] for group in task.groups)


def prepare(task: BlockTask, options: BestOptions) -> Prepared:
    """Decides on the scale of every group, in place in `task`, and on its linears' roundings as
    far as they need no drift."""
    prepared = Prepared()
    options = replace(options, mismatch=0.0)
    for group in task.groups:
        check_moment(task, group)
    for group in reversed(task.groups):
        settled = settle(task, group, options, scaled=False)
        power = {name: relative_to(task, group, name) for name in settled}
        errors = {name: dict(found.errors) for name, found in settled.items()}
        scale = group_scale(task, group, options)
        if scale is not None:
            trial = replace(
                task, weights=dict(task.weights), norms=dict(task.norms), biases=dict(task.biases)
            )
            move_scale(trial, group, scale[0])
            scaled = settle(trial, group, options, scaled=True)
            for name, found in scaled.items():
                errors[name] |= found.errors
            if _is_no_worse(scaled, settled):
                task.weights, task.norms, task.biases = trial.weights, trial.norms, trial.biases
                task.statistics, task.cross = trial.statistics, trial.cross
                task.held_out = trial.held_out
                settled = scaled
                prepared.choices[group.name] = scale[1]
        choice = prepared.choices.get(group.name)
        prepared.results[group.name] = _result(task, group, settled, choice, errors, power)
    return prepared


def _is_no_worse(scaled: dict[str, Settled], unscaled: dict[str, Settled]) -> bool:
    """Whether no linear ends above rounding to nearest without the scale."""
    return all(scaled[n].error <= u.errors["rtn"] for n, u in unscaled.items())


def round_group(
    task: BlockTask, group: InputGroup, options: BestOptions, prepared: Prepared
) -> BlockResult:
    """The linears of one input group under their best roundings, its scale decided already."""
    check_moment(task, group)
    choice = prepared.choices.get(group.name)
    settled = settle(task, group, options, scaled=choice is not None)
    power = {name: relative_to(task, group, name) for name in settled}
    errors = {name: found.errors for name, found in settled.items()}
    return _result(task, group, settled, choice, errors, power)


def settle(
    task: BlockTask, group: InputGroup, options: BestOptions, *, scaled: bool
) -> dict[str, Settled]:
    """The best of all roundings of the group's linears as they are in `task`, by name."""
    settled = {}
    for name, found in _candidates(task, group, options, scaled).items():
        errors = held_out_errors(task, group, name, found)
        best = min(range(len(found)), key=errors.__getitem__)
        settled[name] = Settled(
            candidate=found[best],
            error=errors[best],
            errors={c.label: e for c, e in zip(found, errors, strict=True)},
        )
    return settled


def _candidates(
    task: BlockTask, group: InputGroup, options: BestOptions, scaled: bool
) -> dict[str, list[Candidate]]:
    """Every rounding of the group's linears, by name, rounding to nearest first."""
    moment = task.statistics[group.name].second_moment
    factor = factorise(moment, damping=options.damping, act_order=options.act_order)
    nearest, columns = ("awq", "awq_gptq") if scaled else ("rtn", "gptq")

    def grid_by(clip_by: str | None) -> GridOf:
        if clip_by is None:
            return lambda name, w: quantize(w, task.quant[name], scale_dtype=task.scale_dtype)
        measure = clip_measure(clip_by, moment, factor)
        return lambda name, w: round_nearest(
            w, task.quant[name], measure, task.scale_dtype, options
        )

    found = {}
    for name in (m for m in group.members if m in task.quant):
        weight = task.weights[name]
        found[name] = [Candidate(method=nearest, qtensor=grid_by(None)(name, weight))]
        if options.clip:
            clipped = grid_by("block")(name, weight)
            found[name].append(Candidate(method="awq", qtensor=clipped, notes={"clip": "block"}))
    grids = dict.fromkeys((None, "block", options.clip_by)) if options.clip else (None,)
    for clip_by in grids:
        tunes = clip_by == options.clip_by or not options.clip
        rounded = column_candidates(
            task,
            group,
            factor,
            grid_by(clip_by),
            method=columns,
            mismatch=options.mismatch if tunes else 0.0,
            refit=options.refit and tunes,
            damping=options.damping,
        )
        marks = {} if clip_by is None else {"clip": clip_by}
        for name, more in rounded.items():
            found[name] += [replace(c, notes=marks | dict(c.notes)) for c in more]
    return found


def _result(
    task: BlockTask,
    group: InputGroup,
    settled: dict[str, Settled],
    choice: ScaleChoice | None,
    errors: dict[str, dict[str, float]],
    power: dict[str, float],
) -> BlockResult:
    """What was taken, and reports with the relative held-out errors of all that was compared."""
    moment = task.statistics[group.name].second_moment
    reports = []
    for name, found in settled.items():
        candidate = found.candidate
        notes = {
            **candidate.details,
            **scale_notes(choice),
            **candidate.notes,
            "held_out_error": found.error / power[name],
            "held_out_errors": {label: e / power[name] for label, e in errors[name].items()},
        }
        reports.append(report(task, name, candidate.qtensor, moment, candidate.method, notes))
    return BlockResult(
        qtensors={name: found.candidate.qtensor for name, found in settled.items()},
        reports=tuple(reports),
    )


METHOD = Method(
    name="best",
    summary="of rtn, awq, gptq and awq_gptq what is best for each linear on held-out samples",
    needs_statistics=True,
    quantize_block=quantize_block,
    options_type=BestOptions,
    needs=needs,
    prepare=prepare,
    round_group=round_group,
)
