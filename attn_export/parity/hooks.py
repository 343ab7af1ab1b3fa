"""Scores of a runtime's answers against the reference's, beside the errors. Numpy alone.

A score is one of

    top1[:OUTPUT]      share of rows whose largest entry is the reference's: classifiers
    exact[:OUTPUT]     share of samples (axis 0) that are equal in every element: token sequences
    boxes[:OUTPUT]     share of the reference's detections that have a partner of the same class, an
                       overlap of 0.9 and a score within 0.05
    map50[:OUTPUT]     mAP@0.5 where the reference's detections of a score above 0.25 are the truth

or a function of your own, `module:function` or `path/file.py:function`, from two mappings from
output to array, the runtime's and the reference's, to a number. OUTPUT may be left out where the
model has one. Every case counts by its number of samples; a NaN says that a case has no score.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from attn_export.errors import AttnExportError, UsageError, one_line
from attn_export.parity.detections import map50, matched_share
from attn_export.parity.tolerance import Array
from attn_export.reference import Case

Outputs = Mapping[str, Array]
CONFIDENT = 0.25


@dataclass(frozen=True)
class Hook:
    """A named score."""

    name: str
    function: Callable[[Outputs, Outputs], Any]


@dataclass
class Seen:
    """A score over the cases of one component."""

    hook: Hook
    values: list[float] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)

    def add(self, outputs: Outputs, case: Case) -> None:
        """Score one run.

        Raises:
            UsageError: the function raises, or returns no number.
        """
        try:
            value = float(self.hook.function(outputs, case.outputs))
        except AttnExportError:
            raise
        except Exception as error:  # somebody else's function
            raise UsageError(
                f"the metric {self.hook.name} failed on {case.name}"
                f" ({type(error).__name__}: {one_line(error)})",
                "mend it, or leave it out",
            ) from error
        if not math.isnan(value):
            self.values.append(value)
            self.weights.append(
                max((a.shape[0] for a in case.outputs.values() if a.ndim), default=1)
            )

    def mean(self) -> float:
        return float(np.average(self.values, weights=self.weights))


def top1(found: Array, reference: Array) -> float:
    return float(np.mean(found.argmax(-1) == reference.argmax(-1)))


def exact(found: Array, reference: Array) -> float:
    if found.shape != reference.shape:
        return 0.0
    return float(np.mean((found == reference).reshape(len(reference), -1).all(axis=1)))


def map_of_reference(found: Array, reference: Array) -> float:
    target = np.concatenate([reference[..., :4], reference[..., 5:6]], axis=-1)
    target = np.where(reference[..., 4:5].astype(np.float64) > CONFIDENT, target, -1.0)
    return map50(found, target) if (target[..., 4] >= 0).any() else float("nan")


BUILT_IN: dict[str, Callable[[Array, Array], float]] = {
    "top1": top1,
    "exact": exact,
    "boxes": matched_share,
    "map50": map_of_reference,
}


def resolve(text: str) -> Hook:
    """The score that `text` names.

    Raises:
        UsageError: there is none.
    """
    name, _, output = text.partition(":")
    if name in BUILT_IN:
        return Hook(text, _of_output(text, BUILT_IN[name], output))
    place, _, function = text.rpartition(":")
    if not place or not function:
        known = ", ".join(BUILT_IN)
        raise UsageError(
            f"there is no metric '{text}'", f"use {known}, module:function or path.py:function"
        )
    found = getattr(_import(place), function, None)
    if not callable(found):
        raise UsageError(f"{place} has no function '{function}'", "name one that is defined there")
    return Hook(text, found)


def _of_output(
    text: str, function: Callable[[Array, Array], float], output: str
) -> Callable[[Outputs, Outputs], float]:
    def score(found: Outputs, reference: Outputs) -> float:
        names = [output] if output else list(reference)
        if len(names) != 1 or names[0] not in reference:
            raise UsageError(
                f"the metric {text} needs one output and the model has {', '.join(reference)}",
                f"write {text.partition(':')[0]}:OUTPUT",
            )
        if names[0] not in found:  # which fails by itself
            return float("nan")
        return function(found[names[0]], reference[names[0]])

    return score


def _import(place: str) -> ModuleType:
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        if not Path(place).is_file():
            raise UsageError(f"there is no file {place}", "check the path before the colon")
        name = f"_attn_export_metric_{Path(place).stem}"
        spec = importlib.util.spec_from_file_location(name, place)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module
    except AttnExportError:
        raise
    except Exception as error:  # whatever somebody else's module raises
        raise UsageError(
            f"importing {place} raised {type(error).__name__}: {one_line(error)}", "mend it"
        ) from error
