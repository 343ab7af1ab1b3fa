"""How many broken graphs are caught and how many sound ones pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import onnx_ir as ir

from attn_export.build import export
from attn_export.errors import FileError
from attn_export.exporting.exporter import to_onnx
from attn_export.models.attention.catalogue import CATALOGUE
from attn_export.models.zoo import ZOO
from attn_export.verifying.against import draw_cases
from attn_export.verifying.checking import verify_runtime
from attn_export.verifying.drawn import Drawn, Request
from attn_export.verifying.subject import of_file
from attn_export.verifying.verification import verify
from tests.parity import mutant_models
from tests.parity.mutants import Mutant

FILE = "model.onnx"
HERE = mutant_models.__file__
CLEAN = (
    *(f"{HERE}:{name}" for name in mutant_models.FACTORIES),
    *(f"attn_export.models.attention.catalogue:{name}" for name in CATALOGUE),
    *(name for name in ZOO if name not in ("vit", "detector")),  # whose likes are there, smaller
    f"{HERE}:prefill",
    f"{HERE}:pre_post",
)


def exported(model: str, folder: Path) -> Drawn:
    """A model's graph as PyTorch's exporter gives it, in `folder`, with cases of its source."""
    path = folder / FILE
    ir.save(to_onnx(mutant_models.FACTORIES[model]()).model, path)
    return draw_cases(of_file(path), f"{mutant_models.__file__}:{model}", Request())


def caught(drawn: Drawn, mutant: Mutant, folder: Path) -> bool:
    """Whether the broken graph fails; it must run, or nothing was shown.

    Raises:
        FileError: ONNX Runtime refuses it.
    """
    model = onnx.load(drawn.bundle.path / FILE)
    mutant.mutate(model.graph)
    place = folder / "mutant"
    place.mkdir(exist_ok=True)
    onnx.save(model, place / FILE)
    broken = replace(drawn.bundle, path=place)
    result = verify_runtime(broken, "ort-cpu", drawn.cases)
    raised = [line for line in result.failures if "the runtime raised" in line]
    if len(raised) == len(result.comparisons):
        raise FileError(f"{mutant.name} of {mutant.model} does not run: {raised[0]}", "mend it")
    return not result.passed


def passes(source: str, folder: Path) -> list[str]:
    """What a sound model fails at the default tolerance: exported, lowered, and drawn anew."""
    bundle = export(source, folder / "bundle")
    stored, anew = verify(bundle), verify(bundle, against=source, seed=1)
    return [
        line for result in (stored, anew) for r in result.runtimes.values() for line in r.failures
    ]
