"""Inputs for a file that says little of what it takes, and what they are judged by."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from attn_export.errors import FileError
from attn_export.onnx_files import truth
from attn_export.onnx_files.cases import FileCases, build
from attn_export.onnx_files.inputs import draw, table_rows
from attn_export.onnx_files.onnx_file import OnnxFile, read
from tests.file_graphs import D, attention, expected, floats, save

NODE = helper.make_node


def integers(name: str, *shape: int | str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.INT64, shape)


def built(path: Path, judged: bool = True) -> tuple[OnnxFile, FileCases]:
    file = read(path)
    return file, build(file, judged=judged)


def test_two_batches_two_lengths_and_answers_within_the_truth(tmp_path: Path) -> None:
    _, cases = built(attention(tmp_path / "m.onnx", 11))
    assert [case.inputs["x"].shape for case in cases.cases] == [(1, 7, D), (3, 12, D)]
    assert cases.sizes == [{"batch": 3, "tokens": 12}, {"batch": 1, "tokens": 7}]
    for case in cases.cases:
        wanted = expected(case.inputs["x"])
        np.testing.assert_allclose(case.truth["y"], wanted, rtol=0, atol=1e-12)
        rms = float(np.sqrt(np.mean(np.square(wanted))))
        assert 0 < case.allowed["y"]["all"] < 1e-4 * rms
    assert cases.notes == []


def test_token_ids_stay_inside_of_their_table(tmp_path: Path) -> None:
    nodes = [
        NODE("Cast", ["ids"], ["wide"], to=TensorProto.INT64),
        NODE("Gather", ["table", "wide"], ["y"]),
    ]
    inputs = [helper.make_tensor_value_info("ids", TensorProto.INT32, ["batch", "tokens"])]
    table = {"table": np.arange(10, dtype=np.float32).reshape(5, 2)}
    path = save(tmp_path / "m.onnx", nodes, inputs, [floats("y", "batch", "tokens", 2)], table)
    file, cases = built(path)
    assert table_rows(file.model.graph.inputs[0]) == 5
    drawn = np.concatenate([case.inputs["ids"].ravel() for case in cases.cases])
    assert set(drawn) == {0, 1, 2, 3, 4}


def test_a_mask_gets_holes_and_padding_and_no_blocked_row(tmp_path: Path) -> None:
    model = read(attention(tmp_path / "m.onnx", mask=True)).model
    plain, holes = (
        draw(model, {"batch": 3, "tokens": 12}, masked, 1)["mask"] for masked in (False, True)
    )
    assert plain.all()
    assert set(np.unique(holes)) == {0, 1}
    assert holes[:, 0].all()
    assert not holes[1, 6:].any()


def test_sizes_at_which_the_file_fails_are_left_out_and_told(tmp_path: Path) -> None:
    nodes = [NODE("Reshape", ["x", "sixteens"], ["a"], name="sixteen"), NODE("Neg", ["a"], ["y"])]
    path = save(
        tmp_path / "m.onnx", nodes, [floats("x", "batch", "width")], [floats("y", None, 16)],
        {"sixteens": np.array([-1, 16])},
    )  # fmt: skip
    _, cases = built(path)
    assert [case.name for case in cases.cases] == ["batch=1 width=16", "batch=3 width=32"]
    assert cases.notes == [
        f"it does not run at {bad} (Reshape 'sixteen'); compared at {good} instead"
        for bad, good in (
            ("batch=1 width=7", "batch=1 width=16"), ("batch=3 width=12", "batch=3 width=32"),
        )
    ]  # fmt: skip


def test_sizes_that_leave_no_keys_are_left_out(tmp_path: Path) -> None:
    """A pool of 16 leaves nothing of 7 or 12 columns."""
    nodes = [
        NODE("AveragePool", ["x"], ["a"], kernel_shape=[1, 16], strides=[1, 16], ceil_mode=0),
        NODE("Softmax", ["a"], ["w"]),
        NODE("Mul", ["w", "a"], ["y"]),
    ]
    path = save(
        tmp_path / "m.onnx", nodes, [floats("x", "batch", 1, 2, "width")],
        [floats("y", None, 1, 2, None)],
    )  # fmt: skip
    _, cases = built(path)
    assert [case.inputs["x"].shape[-1] for case in cases.cases] == [16, 32]


def test_a_file_of_fixed_sizes_is_compared_on_two_draws(tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", [NODE("Neg", ["x"], ["y"])], [floats("x", 2, 3)],
                [floats("y", 2, 3)])  # fmt: skip
    _, cases = built(path)
    first, second = cases.cases
    assert (cases.sizes, first.name) == ([{}], "draw 1")
    assert not np.array_equal(first.inputs["x"], second.inputs["x"])


def test_random_numbers_are_not_compared(tmp_path: Path) -> None:
    nodes = [NODE("RandomNormalLike", ["x"], ["r"]), NODE("Add", ["r", "x"], ["y"])]
    path = save(tmp_path / "m.onnx", nodes, [floats("x", 2)], [floats("y", 2)])
    _, cases = built(path)
    assert cases.cases == []
    assert "the whole graph was not compared: the file draws random numbers" in cases.notes


def test_operators_that_no_runtime_has_leave_nothing_to_compare(tmp_path: Path) -> None:
    nodes = [NODE("Twist", ["x"], ["y"], domain="my.ops")]
    path = save(tmp_path / "m.onnx", nodes, [floats("x", "batch", 2)], [floats("y", "batch", 2)],
                {}, domains=["my.ops"])  # fmt: skip
    _, cases = built(path)
    assert cases.notes == [
        "the whole graph was not compared: ONNX Runtime has no operators of my.ops; each site was,"
        " on its own"
    ]
    assert cases.sizes == [{"batch": 3}, {"batch": 1}]


def test_a_graph_that_onnx_runtime_refuses_is_a_bad_file(tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", [NODE("Mul", ["x"], ["y"])], [floats("x", 2)],
                [floats("y", 2)])  # fmt: skip
    with pytest.raises(FileError, match=r"ONNX Runtime .* refuses m\.onnx"):
        built(path)


def test_the_truth_is_stopped_when_it_takes_too_long(tmp_path: Path) -> None:
    path = attention(tmp_path / "m.onnx")
    found, why_not = truth.compute(path, [{"x": np.ones((1, 2, D), np.float32)}], seconds=0.01)
    assert (found, why_not) == ([], "the reference evaluator takes more than 0.01 s")


def test_the_truth_of_what_the_evaluator_lacks_is_none_and_told(tmp_path: Path) -> None:
    nodes = [NODE("FastGelu", ["x"], ["y"], domain="com.microsoft")]
    path = save(tmp_path / "m.onnx", nodes, [floats("x", 2)], [floats("y", 2)],
                {}, domains=["com.microsoft"])  # fmt: skip
    _, cases = built(path)
    assert cases.cases[0].truth == {}
    assert cases.notes[0].startswith("no float64 truth: the reference evaluator does not run it")
    assert 0 < cases.cases[0].allowed["y"]["all"] < 1e-4


def test_a_truth_that_is_no_rounding_away_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: object) -> tuple[list[dict[str, np.ndarray]], str]:
        return [{"y": np.full((1, 7, D), 9.0)}, {"y": np.full((3, 12, D), 9.0)}], ""

    monkeypatch.setattr("attn_export.onnx_files.cases.compute", wrong)
    _, cases = built(attention(tmp_path / "m.onnx"))
    assert [case.truth for case in cases.cases] == [{}, {}]
    assert "the reference evaluator differs from ONNX Runtime" in cases.notes[0]
    assert cases.cases[0].allowed["y"]["all"] < 1e-4
