"""One run's outputs against a case, by the rules of its outputs. Numpy alone."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from attn_export.parity.compare import Comparison, compare_outputs, failed
from attn_export.parity.detections import align, score_allowance
from attn_export.parity.rules import INVERTED, Rule
from attn_export.parity.ties import settle_index, settle_order
from attn_export.parity.tolerance import Array, allowed_error, split
from attn_export.reference import Case


def judge(outputs: Mapping[str, Array], case: Case, rules: Mapping[str, Rule]) -> list[Comparison]:
    """Compare a run's outputs with the case's; a missing or an extra one fails."""
    found, problems = settled(outputs, case, rules)
    groups = {name: rule.groups for name, rule in rules.items()}
    keep = kept(case.inputs, rules)
    results = compare_outputs(
        {name: array for name, array in found.items() if name not in problems},
        {name: array for name, array in case.outputs.items() if name not in problems},
        case.allowed, case.truth, groups, keep,
    )  # fmt: skip
    return results + [failed(name, problem) for name, problem in problems.items()]


def settled(
    outputs: Mapping[str, Array], case: Case, rules: Mapping[str, Rule]
) -> tuple[dict[str, Array], dict[str, str]]:
    """Outputs with what rounding may decide as the reference has it, and what does not fit."""
    found, problems = dict(outputs), dict[str, str]()
    both = {name: rule for name, rule in rules.items() if name in outputs and name in case.outputs}
    for scores in dict.fromkeys(rule.sorted_by for rule in both.values() if rule.sorted_by):
        if scores not in outputs or scores not in case.outputs:
            continue  # which fails by itself
        names = [scores, *(name for name, rule in both.items() if rule.sorted_by == scores)]
        reference = {name: case.outputs[name] for name in names}
        allowed = {name: max(case.allowed[name].values()) for name in names}
        found |= settle_order({n: found[n] for n in names}, reference, scores, allowed)
    for name, rule in both.items():
        if rule.compare == "detections":
            edge = 2 * score_allowance(case.allowed[name], rule.groups)
            found[name] = align(found[name], case.outputs[name], edge)
        elif rule.compare == "index" and rule.of in case.outputs:
            tie = 2 * min(case.allowed[rule.of].values())
            found[name], problem = settle_index(
                found[name], case.outputs[name], case.outputs[rule.of], rule.axis, tie
            )
            if problem:
                problems[name] = problem
    return found, problems


def kept(inputs: Mapping[str, Array], rules: Mapping[str, Rule]) -> dict[str, NDArray[np.bool_]]:
    """The positions (B, S) that count, for each output with a mask."""
    found = {}
    for name, rule in rules.items():
        if rule.mask and rule.mask_input in inputs:
            mask = np.asarray(inputs[rule.mask_input]) != 0
            found[name] = ~mask if rule.mask.startswith(INVERTED) else mask
    return found


def masked_allowances(case: Case, rules: Mapping[str, Rule]) -> dict[str, dict[str, float]]:
    """The case's allowances, measured anew where positions do not count.

    What PyTorch does at padded positions must not widen what is allowed at the others. Without a
    truth there is nothing to measure with, and the allowance stays.
    """
    allowed = {name: dict(row) for name, row in case.allowed.items()}
    for name, keep in kept(case.inputs, rules).items():
        output, truth = case.outputs.get(name), case.truth.get(name)
        if output is None or truth is None or keep.shape != output.shape[:2] or not keep.any():
            continue
        truths = split(truth, rules[name].groups)
        allowed[name] = {
            group: allowed_error(part[keep], truths[group][keep])
            for group, part in split(output, rules[name].groups).items()
        }
    return allowed
