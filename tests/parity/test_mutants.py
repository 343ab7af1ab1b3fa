"""Graphs that were broken on purpose are caught at the default tolerance, and sound ones pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_export.verifying.checking import verify_runtime
from tests.parity.counting import CLEAN, caught, exported, passes
from tests.parity.mutant_models import FACTORIES
from tests.parity.mutants import MUTANTS

MODELS = sorted(FACTORIES)


@pytest.mark.parametrize("model", MODELS)
def test_the_sound_graph_passes_and_every_mutant_is_caught(model: str, tmp_path: Path) -> None:
    drawn = exported(model, tmp_path)
    sound = verify_runtime(drawn.bundle, "ort-cpu", drawn.cases)
    assert sound.failures == []
    mutants = [mutant for mutant in MUTANTS if mutant.model == model]
    assert mutants
    missed = [mutant.name for mutant in mutants if not caught(drawn, mutant, tmp_path)]
    assert missed == []


def test_there_are_enough_of_both() -> None:
    assert len(CLEAN) >= 50
    assert len(MUTANTS) >= 50
    assert len({mutant.model for mutant in MUTANTS}) >= 8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("source", CLEAN)
def test_a_sound_model_passes_at_the_default_tolerance(source: str, tmp_path: Path) -> None:
    assert passes(source, tmp_path) == []
