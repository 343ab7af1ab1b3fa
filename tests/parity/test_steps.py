"""Runs of steps with a runtime's own caches, against the full pass."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import helper

from attn_export import bundle as bundles
from attn_export import verify
from attn_export.build import export
from attn_export.models.decoder_lm import DecoderLMConfig, components
from attn_export.parity.result import RuntimeResult
from attn_export.source import Source
from tests.boundary import reseal

SMALL = DecoderLMConfig(vocab=32, dim=16, layers=1, heads=4, kv_heads=2, hidden=16)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = Source("small", "nowhere:build", components(SMALL))
    return export(source, tmp_path_factory.mktemp("steps") / "bundle").path


def checked(folder: Path) -> RuntimeResult:
    return verify(folder, ["ort-cpu"]).runtimes["ort-cpu"]


def test_every_token_is_also_run_one_by_one(decoder: Path) -> None:
    result = checked(decoder)
    assert result.passed
    assert result.note == ""
    labels = dict.fromkeys(label for label, _ in result.comparisons)
    whole = [f"prefill batch=3 tokens=8, {n} of 8 tokens one by one" for n in range(2, 9)]
    assert [label for label in labels if label.startswith("prefill batch=3 tokens=8, ")][-7:] == (
        whole
    )
    assert "decode batch=3 past=8 masked, step 4 with its own caches" in labels


def test_all_caches_and_logits_of_a_step_are_compared(decoder: Path) -> None:
    label = "prefill batch=3 tokens=8, 5 of 8 tokens one by one"
    outputs = {c.output for name, c in checked(decoder).comparisons if name == label}
    assert outputs == {"logits", "present_mask", "present.0.key", "present.0.value"}


Change = Callable[[onnx.GraphProto], None]


def broken(decoder: Path, tmp_path: Path, component: str, change: Change) -> RuntimeResult:
    folder = Path(shutil.copytree(decoder, tmp_path / "broken"))
    path = folder / f"{component}.cpu.onnx"
    model = onnx.load(path, load_external_data=False)
    change(model.graph)
    path.write_bytes(model.SerializeToString())
    reseal(folder)
    return checked(folder)


def renamed(graph: onnx.GraphProto, name: str) -> str:
    """Let the node that makes an output make a value of another name."""
    inner = f"{name}.before"
    for node in graph.node:
        node.output[:] = [inner if value == name else value for value in node.output]
        node.input[:] = [inner if value == name else value for value in node.input]
    return inner


def newest_first(graph: onnx.GraphProto) -> None:
    """present = new, then past."""
    _rolled(graph, "present.0.key", [-1, 0], [2**62, -1])


def off_by_one(graph: onnx.GraphProto) -> None:
    """The last slot of the cache is dropped and its first comes twice."""
    _rolled(graph, "present.0.value", [0, 0], [1, -1])


def _rolled(graph: onnx.GraphProto, name: str, starts: list[int], stops: list[int]) -> None:
    inner = renamed(graph, name)
    int64 = onnx.TensorProto.INT64
    graph.initializer.append(helper.make_tensor("axis", int64, [1], [2]))
    for part, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        graph.initializer.append(helper.make_tensor(f"start{part}", int64, [1], [start]))
        graph.initializer.append(helper.make_tensor(f"stop{part}", int64, [1], [stop]))
        inputs = [inner, f"start{part}", f"stop{part}", "axis"]
        graph.node.append(helper.make_node("Slice", inputs, [f"{name}.{part}"]))
    parts = [f"{name}.{part}" for part in range(len(starts))]
    graph.node.append(helper.make_node("Concat", parts, [name], axis=2))


@pytest.mark.parametrize("component", ["prefill", "decode"])
@pytest.mark.parametrize("change", [newest_first, off_by_one])
def test_a_broken_present_is_caught(
    decoder: Path, tmp_path: Path, component: str, change: Change
) -> None:
    result = broken(decoder, tmp_path, component, change)
    walked = [c for label, c in result.comparisons if "one by one" in label]
    assert any(not c.passed and c.output.startswith("present.0") for c in walked)
    assert any(not c.passed and c.output == "logits" for c in walked)


def test_the_logits_of_a_step_show_a_cache_that_is_not_an_output_of_its_own(
    decoder: Path, tmp_path: Path
) -> None:
    """Single calls are given PyTorch's caches and stay right; the run of steps does not."""
    result = broken(decoder, tmp_path, "prefill", newest_first)
    calls = [c for label, c in result.comparisons if label == "decode batch=3 past=8"]
    assert all(c.passed for c in calls)


def test_a_model_without_caches_has_no_steps(digits_bundle: Path) -> None:
    result = checked(digits_bundle)
    assert result.note == ""
    assert not any("step" in label for label, _ in result.comparisons)


def test_caches_that_cannot_be_walked_are_told(decoder: Path, tmp_path: Path) -> None:
    bundle = bundles.read(decoder)
    one_token = [case for case in bundle.cases() if case.component == "decode"][:1]
    from attn_export.parity import steps

    assert steps.check(bundle, {}, one_token) == (
        [],
        "no run of several steps was compared: no case has several tokens that can be split",
    )
