"""--cache-capacity: what it refuses, what its bundle says, and verify with garbage behind it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from torch import Tensor, nn

from attn_export import bundle as bundles
from attn_export import export, verify
from attn_export.errors import AttnExportError, ExportError, UsageError
from attn_export.models.decoder_lm import DecoderLMConfig, one_graph
from attn_export.models.spec import ExportSpec
from attn_export.parity.drawing import ends_of, sizes_of, with_past
from attn_export.runtimes.growing import timed
from attn_export.sessions import load
from attn_export.source import Source
from tests.boundary import Cli, reseal

CONFIG = DecoderLMConfig(vocab=40, dim=32, layers=1, heads=4, kv_heads=4, window=5, hidden=48)
CAPACITY = 20


def source(spec: ExportSpec) -> Source:
    return Source("small", "small", {"model": spec})


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> bundles.Bundle:
    """For the CPU, and in half for CUDA."""
    folder = tmp_path_factory.mktemp("capacity") / "bundle"
    return export(source(one_graph(CONFIG, CAPACITY)), folder, targets=("cpu", "cuda"),
                  precision="fp16")  # fmt: skip


def test_the_manifest_tells_the_capacity_and_the_length(bundle: bundles.Bundle) -> None:
    mask, *caches = bundle.manifest["state"]
    assert mask == {"output": "present_mask", "input": "past_mask", "axis": 1}
    assert caches[0] == {
        "output": "present.0.key", "input": "past_key_values.0.key", "axis": 2, "capacity": 20,
        "length": "past_length", "size": "past", "tokens": "tokens",
    }  # fmt: skip
    inputs = {entry["name"]: entry for entry in bundle.manifest["inputs"]}
    assert inputs["past_length"]["shape"] == [1]
    assert inputs["past_key_values.0.value"]["shape"] == ["batch", 4, "capacity", 8]
    assert inputs["past_key_values.0.value"]["ranges"]["capacity"] == [1, 20]
    assert inputs["past_mask"]["ranges"]["past"] == [0, 19]
    for target in bundle.targets():
        (site,) = target["sites"]
        assert (site["lowering"], site["in_place"]) == ("com.microsoft.GroupQueryAttention", True)
        graph = onnx.load(bundle.model_path(target), load_external_data=False).graph
        assert {value.name for value in graph.input} == inputs.keys()


def test_it_is_verified_in_shared_buffers_on_both(bundle: bundles.Bundle) -> None:
    result = verify(bundle, stand_ins=True)
    assert result.passed
    assert len(result.runtimes) == 2
    assert any("one by one" in name for name, _ in result.runtimes["ort-cpu"].comparisons)


def test_stored_cases_have_no_position_that_is_not_filled(bundle: bundles.Bundle) -> None:
    for case in bundle.cases():
        past = case.inputs["past_mask"].shape[1]
        assert case.inputs["past_key_values.0.key"].shape[2] == past
        assert case.outputs["present.0.key"].shape[2] == past + case.inputs["input_ids"].shape[1]
        assert "past_length" not in case.inputs


def test_a_graph_that_writes_one_place_off_fails(bundle: bundles.Bundle, tmp_path: Path) -> None:
    """seqlens_k one too small: new tokens land on the last cached one."""
    copy = Path(shutil.copytree(bundle.path, tmp_path / "copy"))
    (target,) = (t for t in bundle.targets() if t["runtime"] == "ort-cpu")
    model = onnx.load(copy / target["file"], load_external_data=False)
    (node,) = (n for n in model.graph.node if n.op_type == "GroupQueryAttention")
    model.graph.initializer.append(numpy_helper.from_array(np.array(-1, np.int32), "one_less"))
    place = list(model.graph.node).index(node)
    added = helper.make_node("Add", [node.input[5], "one_less"], ["too_few"])
    node.input[5] = "too_few"
    model.graph.node.insert(place, added)
    onnx.save(model, copy / target["file"])
    reseal(copy)
    seen = verify(copy, ["ort-cpu"]).runtimes["ort-cpu"]
    wrong = {found.output for _, found in seen.comparisons if not found.passed}
    assert {"logits", "present.0.key", "present.0.value"} <= wrong
    assert any(not f.passed for name, f in seen.comparisons if "one by one" in name)


def test_what_is_timed_is_a_step_in_place(bundle: bundles.Bundle) -> None:
    case = next(c for c in bundle.cases() if c.inputs["past_mask"].shape[1])
    with load(bundle, "ort-cpu") as session:
        expected = session.run(case.inputs)["logits"]
        again = timed(session, case.inputs)
        assert again is not None
        step, inputs = again
        assert inputs.keys() == {"input_ids", "attention_mask", "past_mask"}
        for _ in range(3):
            made = step.run(inputs)
            assert made.keys() == {"logits", "present_mask"}
            assert (made["logits"] == expected).all()


def test_sizes_are_those_that_the_op_takes() -> None:
    spec = one_graph(CONFIG, CAPACITY)
    ends, note = ends_of(spec)
    for sizes in [*sizes_of(spec), *ends]:
        assert sizes["past"] + sizes["tokens"] <= CAPACITY
        assert 1 in (sizes["batch"], sizes["tokens"]) or not sizes["past"]
    assert ({"batch": 1, "tokens": 1, "past": 19} in ends, note) == (True, "")
    assert any(s["batch"] > 1 and s["past"] for s in sizes_of(spec))
    assert any(s["tokens"] > 1 and s["past"] for s in with_past(spec))
    assert all(s["past"] for s in with_past(spec))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"cache_capacity": 1}, "--cache-capacity is 1; give 2 or more."),
        ({"targets": ["cpu", "openvino"]}, "--cache-capacity has no graph for openvino; choose"),
        ({"lowering": "standard"}, "--lowering standard copies caches, and --cache-capacity is"),
        ({"targets": ["cuda"]}, "--cache-capacity is given, and CUDA continues float16 caches"),
        ({"targets": ["cuda"], "precision": "bf16"}, "--cache-capacity is given, and caches of a"),
    ],
    ids=["one", "target", "lowering", "float32", "bf16"],
)
def test_options_that_do_not_fit_are_refused(
    tmp_path: Path, options: dict[str, object], sentence: str
) -> None:
    given: dict[str, Any] = {"cache_capacity": 8, **options}
    with pytest.raises(UsageError) as raised:
        export("decoder-lm", tmp_path / "bundle", **given)
    assert str(raised.value).startswith(sentence)
    assert not any(tmp_path.iterdir())


def test_a_model_without_caches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the model has no cache .* that grows; leave it out"):
        export("vit-digits", tmp_path / "bundle", cache_capacity=8)


class Peeks(nn.Module):
    """Also returns the sum of the cached keys, which buffers have more of."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        past_mask: Tensor,
        past_key_values_0_key: Tensor,
        past_key_values_0_value: Tensor,
    ) -> tuple[Tensor, ...]:
        caches = {"past_key_values_0_key": past_key_values_0_key,
                  "past_key_values_0_value": past_key_values_0_value}  # fmt: skip
        masks = {"attention_mask": attention_mask, "past_mask": past_mask}
        made = self.model(input_ids=input_ids, **masks, **caches)
        return (*made, past_key_values_0_key.sum(2))


def test_a_cache_that_is_read_beside_its_attention_is_refused(tmp_path: Path) -> None:
    spec = one_graph(CONFIG, CAPACITY)
    spec.module, spec.outputs = Peeks(spec.module).eval(), (*spec.outputs, "sums")
    with pytest.raises(ExportError, match=r"'past_key_values\.0\.key' is also read by ReduceSum"):
        export(source(spec), tmp_path / "bundle")


def test_heads_that_the_op_does_not_take_are_the_reason(tmp_path: Path) -> None:
    """A head size of 6."""
    config = DecoderLMConfig(vocab=40, dim=24, layers=1, heads=4, kv_heads=2, hidden=24)
    with pytest.raises(AttnExportError) as raised:
        export(source(one_graph(config, 12)), tmp_path / "bundle")
    assert "cannot continue its cache in place: heads: " in str(raised.value)
    assert "needs a head size that is a multiple of 8" in str(raised.value)
    assert raised.value.exit_code == 4


def test_the_command_line_refuses_no_number(cli: Cli, tmp_path: Path) -> None:
    for number in ("many", "1"):
        ended = cli("export", "decoder-lm", "-o", "nowhere", "--cache-capacity", number)
        assert ended.code == 2
        assert "--cache-capacity" in ended.stderr
    assert not any(tmp_path.iterdir())
