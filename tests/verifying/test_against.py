"""`verify --against`: a model with answers from elsewhere, drawn anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from attn_export import assert_parity, verify
from attn_export.errors import CheckFailed, ExportError, UsageError
from attn_export.verifying.against import draw_cases
from attn_export.verifying.drawn import Request
from attn_export.verifying.subject import of_file
from tests.boundary import Cli


def model_file(
    path: Path,
    *nodes: onnx.NodeProto,
    shape: tuple[int | str, ...] = ("rows", 3),
    output: str = "y",
    **weights: np.ndarray,
) -> Path:
    """A file from x of `shape` to an output of the same shape."""
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in ("x", output))
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(list(nodes), "g", [x], [y], tensors)
    opset = [helper.make_opsetid("", 21)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), path)
    return path


TANH = helper.make_node("Tanh", ["x"], ["y"])
SCALED = (helper.make_node("Mul", ["x", "c"], ["s"]), helper.make_node("Tanh", ["s"], ["y"]))
ONE_PERCENT = {"c": np.array([1, 1, 1.01], np.float32)}
ROWS = helper.make_node("Softmax", ["x"], ["y"], axis=0)  # over the batch

SOURCE = """
import torch
from torch import nn

class Tanh(nn.Module):
    def forward(self, x):
        return torch.tanh(x)

class Called(nn.Module):
    def forward(self, x):
        return {"other": torch.tanh(x)}

def build():
    return Tanh(), {"x": torch.randn(2, 3)}

def called():
    from attn_export.models.spec import ExportSpec
    return ExportSpec(Tanh(), {"x": torch.randn(2, 3)}, outputs=("other",))

def two_inputs():
    class Sum(nn.Module):
        def forward(self, x, z):
            return x + z
    return Sum(), {"x": torch.randn(2, 3), "z": torch.randn(2, 3)}

def only_two():
    class Two(nn.Module):
        def forward(self, x):
            return torch.tanh(x.view(2, 3))
    return Two(), {"x": torch.randn(2, 3)}
"""


@pytest.fixture
def source(tmp_path: Path) -> Callable[[str], str]:
    (tmp_path / "source.py").write_text(SOURCE)
    return lambda name: f"{tmp_path}/source.py:{name}"


Source = Callable[[str], str]


def test_a_file_passes_against_its_source_at_other_batches(tmp_path: Path, source: Source) -> None:
    result = verify(model_file(tmp_path / "m.onnx", TANH), against=source("build"))
    assert result.passed
    assert result.cases == ("batch=1", "batch=3", "batch=2")
    assert (result.seed, result.reference) == (0, "PyTorch")
    labels = [label for label, _ in result.runtimes["ort-cpu"].comparisons]
    assert "batch=3, row 2 alone" in labels


def test_one_percent_in_one_column_fails(tmp_path: Path, source: Source) -> None:
    file = model_file(tmp_path / "m.onnx", *SCALED, **ONE_PERCENT)
    result = verify(file, against=source("build"))
    assert not result.passed
    assert {c.where[1] for _, c in result.runtimes["ort-cpu"].comparisons if c.where} == {2}


def test_the_seed_decides_the_cases(tmp_path: Path, source: Source) -> None:
    file = of_file(model_file(tmp_path / "m.onnx", TANH))
    first, again, other = (
        draw_cases(file, source("build"), Request(seed=seed)).cases[0].inputs["x"]
        for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_a_size_that_the_file_fixes_is_the_only_one_run(tmp_path: Path, source: Source) -> None:
    file = model_file(tmp_path / "m.onnx", TANH, shape=(5, 3))
    result = verify(file, against=source("build"))
    assert (result.passed, result.cases) == (True, ("batch=5",))
    assert "the model takes 5 alone on axis 0 of 'x'" in result.notes


def test_a_batch_that_the_source_refuses_is_told(tmp_path: Path, source: Source) -> None:
    result = verify(model_file(tmp_path / "m.onnx", TANH), against=source("only_two"))
    assert result.passed
    assert any(note.startswith("the source takes no other batch") for note in result.notes)


def test_a_misnamed_output_fails_where_the_source_names_its_own(
    tmp_path: Path, source: Source
) -> None:
    file = model_file(tmp_path / "m.onnx", TANH)
    failures = verify(file, against=source("called")).runtimes["ort-cpu"].failures
    assert "batch=1: output 'y': the reference has no such output" in failures
    assert "batch=1: output 'other': the runtime did not return it" in failures


def test_outputs_without_names_are_compared_in_order_and_that_is_said(
    tmp_path: Path, source: Source
) -> None:
    result = verify(model_file(tmp_path / "m.onnx", TANH), against=source("build"))
    assert any("compared in order: output as y" in note for note in result.notes)


def test_an_input_that_the_source_has_not_is_refused(tmp_path: Path, source: Source) -> None:
    x, z, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["rows", 3]) for n in "xzy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "z"], ["y"])], "g", [x, z], [y])
    opset = [helper.make_opsetid("", 21)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=10)
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(UsageError, match="has input 'z', which the source has not"):
        verify(tmp_path / "m.onnx", against=source("build"))
    assert verify(tmp_path / "m.onnx", against=source("two_inputs")).passed


def test_two_files(tmp_path: Path) -> None:
    given = model_file(tmp_path / "given.onnx", TANH)
    same = model_file(tmp_path / "same.onnx", TANH)
    other = model_file(tmp_path / "other.onnx", *SCALED, **ONE_PERCENT)
    good = verify(same, against=given)
    assert (good.passed, good.reference, good.cases) == (True, "given.onnx", ("rows=1", "rows=3"))
    bad = verify(other, against=given)
    assert not bad.passed
    assert all(c.where and c.where[1] == 2 for _, c in bad.runtimes["ort-cpu"].comparisons)


def test_a_file_that_fixes_a_size_is_compared_at_that_one(tmp_path: Path) -> None:
    given = model_file(tmp_path / "given.onnx", TANH)
    fixed = model_file(tmp_path / "fixed.onnx", TANH, shape=(4, 3))
    assert set(verify(fixed, against=given).cases) == {"rows=4", "rows=4, draw 2"}


def test_a_renamed_output_of_a_file_fails(tmp_path: Path) -> None:
    given = model_file(tmp_path / "given.onnx", TANH)
    node = helper.make_node("Tanh", ["x"], ["z"])
    renamed = model_file(tmp_path / "renamed.onnx", node, output="z")
    failures = verify(renamed, against=given).runtimes["ort-cpu"].failures
    assert failures[0] == "rows=1: output 'z': the reference has no such output"


def test_rows_that_leak_into_one_another_are_found(tmp_path: Path, source: Source) -> None:
    """Also where the whole batch agrees: the rows alone do not, or the reference is said to mix."""
    given, leaky = model_file(tmp_path / "g.onnx", TANH), model_file(tmp_path / "l.onnx", ROWS)
    assert not verify(leaky, against=given).passed
    mixing = verify(model_file(tmp_path / "same.onnx", ROWS), against=leaky)
    assert mixing.passed
    assert any("l.onnx mixes them" in note for note in mixing.notes)


def test_a_bundle_against_its_source_and_a_file_against_a_bundle(digits_bundle: Path) -> None:
    result = verify(digits_bundle, against="vit-digits", seed=5)
    assert (result.passed, result.seed) == (True, 5)
    assert verify(digits_bundle / "model.cpu.onnx", against=digits_bundle).passed


def test_corrupted_weights_fail_against_every_kind(wrong_bundle: Path, digits_bundle: Path) -> None:
    wrong = wrong_bundle / "model.cpu.onnx"
    for against in ("vit-digits", digits_bundle, digits_bundle / "model.cpu.onnx"):
        with pytest.raises(CheckFailed, match=r"ort-cpu differs from .*output 'logits'.*worst"):
            assert_parity(wrong, against=against)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "carries no answers to compare with; add --against"),
        ({"against": "vit-digit"}, "no model 'vit-digit'; did you mean vit-digits"),
        ({"against": "FILE"}, "is the very file that is verified"),
        ({"against": "SOURCE", "compare": {"z": "index"}}, "there is no output 'z'"),
        ({"against": "SOURCE", "mask_output": {"y": "w"}}, "'w', which is not an input"),
        ({"against": "SOURCE", "metrics": ["top2"]}, "there is no metric 'top2'"),
        ({"against": "SOURCE", "runtimes": ["abacus"]}, "there is no runtime 'abacus'"),
    ],
)
def test_usage(tmp_path: Path, source: Source, options: dict[str, Any], sentence: str) -> None:
    file = model_file(tmp_path / "m.onnx", TANH)
    given = {"FILE": str(file), "SOURCE": source("build")}
    if "against" in options:
        options = {**options, "against": given.get(str(options["against"]), options["against"])}
    with pytest.raises(UsageError, match=sentence):
        verify(file, **options)


@pytest.mark.parametrize("option", [{"seed": 1}, {"inputs": ["x=float32[1]"]}])
def test_what_draws_cases_needs_a_source(digits_bundle: Path, option: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="add --against"):
        verify(digits_bundle, **option)


def test_a_source_that_raises_is_told(tmp_path: Path, source: Source) -> None:
    (tmp_path / "source.py").write_text("def build():\n    raise ValueError('no')\n")
    with pytest.raises(ExportError, match="raised ValueError"):
        verify(model_file(tmp_path / "m.onnx", TANH), against=source("build"))


def test_exit_codes_and_json(cli: Cli, tmp_path: Path, source: Source) -> None:
    file = model_file(tmp_path / "m.onnx", TANH)
    assert cli("verify", file).code == 2
    good = cli("verify", file, "--against", source("build"), "--seed", "3", "--json")
    assert (good.code, good.json["seed"], good.json["passed"]) == (0, 3, True)
    row = good.json["runtimes"]["ort-cpu"]["outputs"]["y"]
    assert {"sqnr_db", "smallest_atol", "smallest_rtol", "excluded", "where"} <= row.keys()
    model_file(file, *SCALED, **ONE_PERCENT)
    bad = cli("verify", file, "--against", source("build"))
    assert bad.code == 1
    assert "Cases drawn anew with seed 0." in bad.stdout
    assert "ort-cpu differs from PyTorch" in bad.sentence
