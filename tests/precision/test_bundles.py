"""Bundles with several precisions, through export, verify, bench and inspect."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import onnx
import pytest

from attn_export import bundle as bundles
from attn_export.bench.benchmark import benchmark
from attn_export.build import export
from attn_export.errors import UsageError
from attn_export.inspection import inspect_source
from attn_export.precision.speed import precision_lines, speed_lines
from attn_export.verifying.verification import verify
from tests.boundary import Cli, reseal


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> bundles.Bundle:
    """`vit-digits` in float32, float16 and int8."""
    folder = tmp_path_factory.mktemp("three") / "bundle"
    return export("vit-digits", folder, precision="fp32,fp16,int8")


@pytest.fixture
def three_copy(three: bundles.Bundle, tmp_path: Path) -> Path:
    return Path(shutil.copytree(three.path, tmp_path / "copy"))


def test_each_precision_is_a_target_with_its_own_way_to_be_judged(three: bundles.Bundle) -> None:
    targets = {t["name"]: t for t in three.targets()}
    assert {name: t["precision"] for name, t in targets.items()} == {
        "cpu": "fp32", "cpu-fp16": "fp16", "cpu-int8": "int8"
    }  # fmt: skip
    assert targets["cpu-fp16"]["file"] == "model.cpu-fp16.onnx"
    assert "PyTorch's own fp16 run, module.half()" in targets["cpu-fp16"]["tolerance"]["words"]
    assert targets["cpu-int8"]["tolerance"]["bounds"] == [{"name": "top1-drop", "value": 0.01}]
    assert targets["cpu-fp16"]["io"]["inputs"] == {"image": "float32"}


def test_the_float32_graph_is_what_it_is_alone(three: bundles.Bundle, digits_bundle: Path) -> None:
    name = "model.cpu.onnx"
    assert (three.path / name).read_bytes() == (digits_bundle / name).read_bytes()


def test_half_weights_take_half_of_the_room(three: bundles.Bundle) -> None:
    def floats(name: str) -> dict[int, int]:
        found: dict[int, int] = {}
        for tensor in onnx.load(three.path / name).graph.initializer:
            found[tensor.data_type] = found.get(tensor.data_type, 0) + len(tensor.raw_data)
        return found

    single, half = floats("model.cpu.onnx"), floats("model.cpu-fp16.onnx")
    assert half[onnx.TensorProto.FLOAT16] > 0.4 * single[onnx.TensorProto.FLOAT]
    assert half.get(onnx.TensorProto.FLOAT, 0) < 0.01 * single[onnx.TensorProto.FLOAT]


def test_ops_are_those_with_a_kernel_for_the_precision(three: bundles.Bundle) -> None:
    """On a CPU the standard op alone has a float16 kernel; int8 wants its projections outside."""
    ops = {t["name"]: {site["lowering"] for site in t["sites"]} for t in three.targets()}
    assert ops == {
        "cpu": {"com.microsoft.Attention", "ai.onnx.Attention"},  # the last block has one query
        "cpu-fp16": {"ai.onnx.Attention"},
        "cpu-int8": {"ai.onnx.Attention"},
    }
    counts = {(t["total"], t["recognised"], t["lowered"]) for t in three.targets()}
    assert counts == {(6, 6, 6)}
    assert not [note for note in three.manifest["notes"] if "stands between" in note]


def test_all_precisions_are_verified_and_told_apart(three: bundles.Bundle) -> None:
    found = verify(three)
    assert found.passed
    seen = {name: result.precision for name, result in found.runtimes.items()}
    assert seen == {"ort-cpu": "fp32", "ort-cpu-fp16": "fp16", "ort-cpu-int8": "int8"}
    half = found.runtimes["ort-cpu-fp16"].worst()["logits"]
    single = found.runtimes["ort-cpu"].worst()["logits"]
    assert half.allowed > 100 * single.allowed
    assert half.torch_error_vs_truth is not None
    assert half.torch_error_vs_truth > 100 * (single.torch_error_vs_truth or 0)
    (bound,) = found.runtimes["ort-cpu-int8"].bounds
    assert bound.passed
    assert bound.found <= 0.01


def test_one_precision_can_be_asked_for_by_name(three: bundles.Bundle) -> None:
    assert list(verify(three, ["ort-cpu-int8"]).runtimes) == ["ort-cpu-int8"]
    assert verify(three, ["ort-cpu-fp32"]).runtimes["ort-cpu-fp32"].precision == "fp32"
    with pytest.raises(UsageError, match="no bf16 graph for ort-cpu, it has targets cpu, cpu-fp16"):
        verify(three, ["ort-cpu-bf16"])


def _edit_int8(folder: Path, bounds: list[dict[str, object]]) -> None:
    path = folder / bundles.MANIFEST
    manifest = json.loads(path.read_text())
    for target in manifest["targets"]:
        if target["precision"] == "int8":
            target["tolerance"]["bounds"] = bounds
    path.write_text(json.dumps(manifest))
    reseal(folder)


def test_a_bound_that_is_not_kept_fails(three_copy: Path) -> None:
    _edit_int8(three_copy, [{"name": "cosine", "value": 1.0}])
    result = verify(three_copy, ["ort-cpu-int8"])
    assert not result.passed
    (failure,) = result.runtimes["ort-cpu-int8"].failures
    assert failure.startswith("cosine is 0.9999")


def test_int8_without_a_bound_fails_instead_of_guessing(three_copy: Path) -> None:
    _edit_int8(three_copy, [])
    result = verify(three_copy, ["ort-cpu-int8"])
    assert not result.passed
    assert result.runtimes["ort-cpu-int8"].failures == [
        "nothing says how far off answers in this precision may be"
    ]


def test_wrong_half_weights_are_seen(three_copy: Path) -> None:
    """The largest half weight is moved by an eighth of its size."""
    path = three_copy / "model.cpu-fp16.onnx"
    model = onnx.load(path, load_external_data=False)
    node = next(n for n in model.graph.node if n.op_type == "Attention")
    node.attribute.extend([onnx.helper.make_attribute("scale", 0.3)])  # 0.25 is right
    path.write_bytes(model.SerializeToString())
    reseal(three_copy)
    result = verify(three_copy)
    assert [name for name, row in result.runtimes.items() if not row.passed] == ["ort-cpu-fp16"]


def test_latency_stands_next_to_accuracy(three: bundles.Bundle) -> None:
    result = benchmark(three, seconds=0.25, baseline="ort-cpu")
    lines = precision_lines(result)
    assert len(lines) == 2
    assert lines[0].startswith("ort-cpu-fp16: top1 98.61% (+0.00%), ")
    assert lines[1].startswith("ort-cpu-int8: top1 9")
    assert all(" ms" in line and "fp32" in line for line in lines)
    assert result.to_json()["runtimes"]["ort-cpu-int8"]["precision"] == "int8"


def test_what_is_slower_is_said_and_what_cannot_be_told_apart_too() -> None:
    precisions = {"ort-cpu": "fp32", "ort-cpu-fp16": "fp16"}
    scores = {"ort-cpu-fp16": "top1 98.00% (-1.00%)"}

    def line(*half: float) -> str:
        low, median, high = half
        medians = {"ort-cpu": (2.0, 1.9, 2.1), "ort-cpu-fp16": (median, low, high)}
        return speed_lines(medians, precisions, scores)[0]

    start = "ort-cpu-fp16: top1 98.00% (-1.00%), "
    assert line(2.9, 3, 3.1) == f"{start}3.000 ms, SLOWER than fp32 by 50% (2.000 ms)"
    assert line(0.9, 1, 1.1) == f"{start}1.000 ms, 2.00 times as fast as fp32 (2.000 ms)"
    assert line(1.8, 1.95, 2) == f"{start}1.950 ms, not told apart from fp32 (2.000 ms)"
    alone = speed_lines({"ort-cpu": (1, 1, 1)}, {"ort-cpu": "int8"}, {})
    assert alone == [
        "ort-cpu in int8: 1.000 ms; fp32 was not timed beside it, --precision fp32,int8 does both"
    ]


def test_inspect_tells_what_stays_float32(three: bundles.Bundle, cli: Cli) -> None:
    shown = json.loads(cli("inspect", three.path, "--precision", "int8", "--json").stdout)
    assert (shown["precision"], shown["lowered"]) == ("int8", 6)
    (account,) = inspect_source("vit-digits", "tensorrt", lambda _: None, precision="fp16")
    assert {site["lowering"] for site in account["sites"]} == {"decomposed"}


def test_a_refusal_exits_2_and_writes_nothing(cli: Cli, tmp_path: Path) -> None:
    ended = cli("export", "text-encoder", "--precision", "int8", "-o", "b")
    assert ended.code == 2
    assert "nothing says how far off int8 answers may be; declare a bound" in ended.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("target", "precision", "bounds", "said"),
    [
        ("cpu", "bf16", [], "no bfloat16 kernels"),
        ("openvino", "fp16", [], "OpenVINO chooses"),
        ("cpu", "int8", ["map50-drop=0.1"], "comes with no map50 score"),
        ("cpu", "int8", ["bleu=3"], "no metric bound 'bleu'"),
        ("cpu", "int8", ["top1"], "has no number"),
        ("cpu", "int8", ["top1=7"], "top1 is 7"),
        ("cpu", "fp8", [], "precision fp8 is not built"),
        ("cpu", "fp32", ["top1=1"], "fp32 is judged by PyTorch's own error"),
    ],
)
def test_what_is_not_built_or_cannot_be_judged_is_refused(
    tmp_path: Path, target: str, precision: str, bounds: list[str], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        export(
            "vit-digits", tmp_path / "b", targets=(target,), precision=precision,
            metric_bounds=bounds,
        )  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_inputs_and_outputs_can_be_float16_too(tmp_path: Path) -> None:
    made = export("vit-digits", tmp_path / "b", precision="fp16", io_dtype="fp16")
    (target,) = made.targets()
    assert target["io"] == {"inputs": {"image": "float16"}, "outputs": {"logits": "float16"}}
    assert verify(made).passed
    with pytest.raises(UsageError, match="--io-dtype fp16 is given without an fp16 graph"):
        export("vit-digits", tmp_path / "c", io_dtype="fp16")


@pytest.mark.slow
def test_a_detector_keeps_its_detections_in_float16(tmp_path: Path) -> None:
    made = export("detector-digits", tmp_path / "b", precision="fp16")
    found = verify(made)
    assert found.passed
    assert found.metric is not None
    score = found.runtimes["ort-cpu"].metric
    assert score is not None
    assert abs(score - found.metric["reference"]) <= 0.005
    (target,) = made.targets()
    kept = {row["op"] for row in target["kept_float32"]}
    assert {"Resize", "Range"} <= kept
    assert not {"Conv", "MatMul", "Attention"} & kept


def test_caches_are_float16_and_a_loop_over_them_gives_the_same_sentences(tmp_path: Path) -> None:
    made = export("translator", tmp_path / "b", targets=("cpu", "cuda"), precision="fp16")
    found = verify(made, stand_ins=True)
    assert found.passed
    assert {name: row.metric for name, row in found.runtimes.items()} == {
        "ort-cpu": 1.0, "ort-cuda (stand-in: ort-cpu, rounding to half)": 1.0
    }  # fmt: skip
    target = next(t for t in made.targets("decoder") if t["name"] == "cuda-fp16")
    assert target["io"]["inputs"]["past_key_values.0.key"] == "float16"
    assert target["io"]["inputs"]["memory"] == "float32"
    assert {s["lowering"] for s in target["sites"]} >= {"com.microsoft.GroupQueryAttention"}


def test_the_site_that_is_wrong_in_a_half_graph_is_named(three_copy: Path) -> None:
    path = three_copy / "model.cpu-fp16.onnx"
    model = onnx.load(path, load_external_data=False)
    third = [n for n in model.graph.node if n.op_type == "Attention"][2]
    third.attribute.extend([onnx.helper.make_attribute("scale", 2.5)])
    path.write_bytes(model.SerializeToString())
    reseal(three_copy)
    drift = verify(three_copy, ["ort-cpu-fp16"]).runtimes["ort-cpu-fp16"].drift
    assert drift is not None
    assert "blocks.2.attn" in " ".join(drift.lines())
