"""Variants that were made on purpose: a wrong one is never kept, whatever it takes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from attn_export import bundle as bundles
from attn_export import verify
from attn_export.storage import scratch
from attn_export.tuned import Settings
from attn_export.tuning import bases
from attn_export.tuning.contest import Clock, Contest
from attn_export.tuning.lowerings import first, lowered
from attn_export.tuning.record import publish
from attn_export.tuning.result import Tuned
from attn_export.tuning.runtime import Found, _as_it_is
from attn_export.tuning.stage import Stage, Variant
from attn_export.tuning.together import Chosen, Kept
from attn_export.tuning.variants import PLAIN

CPU = "ort-cpu"


@pytest.fixture
def contest(bundle_copy: Path) -> Iterator[Contest]:
    bundle = bundles.read(bundle_copy)
    (target,) = bundle.targets()
    plain = _as_it_is(bundle, target, PLAIN, Settings())
    with scratch(bundle_copy) as folder:
        stage = Stage(folder, bundle, target, "batch=1")
        yield Contest(stage, plain, Clock(30.0), lambda _: None)


def constant_answers(bundle: bundles.Bundle) -> ir.Model:
    """The stored answer to the timed case, computed from nothing: right there, and nowhere else."""
    case = bundle.cases()[0]
    image = helper.make_tensor_value_info("image", onnx.TensorProto.FLOAT, ["batch", 1, 8, 8])
    logits = helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["batch", 10])
    stored = numpy_helper.from_array(case.outputs["logits"], "answer")
    node = helper.make_node("Identity", ["answer"], ["logits"])
    graph = helper.make_graph([node], "g", [image], [logits], [stored])
    opset = [helper.make_opsetid("", 23)]
    return ir.from_proto(helper.make_model(graph, opset_imports=opset, ir_version=10))


def test_a_wrong_variant_is_not_kept_though_it_is_fastest(contest: Contest) -> None:
    cheat = Variant("cheat", CPU, constant_answers(contest.stage.bundle), {"sites": []})
    contest.run("lowerings", [cheat], 30.0)
    assert contest.best is contest.plain
    (row,) = [row for row in contest.log if row["name"] == "cheat"]
    assert row["median_ms"] is None
    assert row["wrong"].startswith("batch=3, logits: ")


def test_a_variant_that_the_runtime_refuses_is_told_and_passed_over(contest: Contest) -> None:
    broken = constant_answers(contest.stage.bundle)
    broken.graph[0].op_type = "NoSuchOperator"
    contest.run("lowerings", [Variant("broken", CPU, broken, {"sites": []})], 30.0)
    assert contest.best is contest.plain
    assert "refuses" in contest.log[1]["wrong"]


def test_a_plain_export_that_is_the_fastest_is_kept(contest: Contest) -> None:
    """Without any optimisation, and with work that nobody needs, the same graph is slower."""
    slow = contest.plain.model.clone()
    image = slow.graph.inputs[0]
    noise, last = [], image
    for index in range(300):
        node = ir.node("Sin", [last], name=f"sin_{index}")
        last = node.outputs[0]
        noise.append(node)
    zero = ir.node("Sub", [last, last], name="zero")
    added = ir.node("Add", [image, zero.outputs[0]], name="added")
    for use in list(image.uses()):
        if use.node not in (*noise, zero, added):
            use.node.replace_input_with(use.idx, added.outputs[0])
    slow.graph.insert_before(slow.graph[0], [*noise, zero, added])
    variant = Variant("slow", CPU, slow, contest.plain.account, Settings(level="off"))
    contest.run("lowerings", [variant], 30.0)
    assert contest.log[1].get("wrong") is None
    assert contest.log[1]["ratio"] > 1
    assert contest.best is contest.plain


def test_what_does_not_fit_into_the_time_is_skipped_and_said(contest: Contest) -> None:
    others = [contest.plain.with_settings(f"s{n}", Settings(level="basic")) for n in range(3)]
    contest.run("threads", others, until=-1.0)
    assert contest.skipped == ["threads of ort-cpu: s0, s1, s2"]
    assert contest.log == []


def chosen(contest: Contest, variant: Variant) -> Tuned:
    """A result in which this variant was found best."""
    target = contest.stage.target
    ops = {str(site["name"]): site["lowering"] for site in target["sites"]}
    found = Found(target, CPU, False, contest, ops)
    kept = Kept(found, variant, contest.decision, {}, None)
    done = Chosen("model", [kept], CPU, "the only one that was tuned")
    return Tuned(str(contest.stage.bundle.path), [found], [done], [], 1.0, 1.0)


def test_another_graph_replaces_the_bundles_with_its_weights_and_sites(contest: Contest) -> None:
    bundle = contest.stage.bundle
    sizes = bases.sizes_of(bundle, bundle.cases(), "batch=1")
    base = bases.from_file(bundle, contest.stage.target, sizes)
    made = lowered(base, CPU, first(CPU, "decomposed")).variant(CPU, "decomposed")
    made = made.with_settings("decomposed, 1 thread", Settings(threads=1))
    assert publish(bundle, chosen(contest, made), [], lambda _: None) is True
    after = bundles.read(bundle.path)
    (target,) = after.targets()
    assert {site["lowering"] for site in target["sites"]} == {"decomposed"}
    assert {site["status"] for site in target["sites"]} == {"decomposed-by-choice"}
    assert all(site["reason"].startswith("measured by tune: ") for site in target["sites"])
    assert (target["lowered"], target["refused"], target["total"]) == (0, 0, 6)
    assert target["work"] == contest.stage.target["work"]
    assert target["tuned"]["settings"] == {"threads": 1}
    assert target["tuned"]["exported"]["blocks.0.attn"] == "com.microsoft.Attention"
    ops = {node.op_type for node in onnx.load(after.model_path(target)).graph.node}
    assert "Softmax" in ops
    assert "Attention" not in ops
    assert after.manifest["tuned"]["model"]["runtime"] == CPU
    assert verify(after, [CPU]).passed


def test_a_graph_that_is_wrong_as_a_whole_leaves_the_bundle_as_it_was(contest: Contest) -> None:
    bundle = contest.stage.bundle
    before = {path.name: path.read_bytes() for path in bundle.path.iterdir()}
    cheat = Variant("cheat", CPU, constant_answers(bundle), contest.plain.account)
    with pytest.raises(Exception, match="what was tuned for ort-cpu differs from PyTorch"):
        publish(bundle, chosen(contest, cheat), [], lambda _: None)
    assert {path.name: path.read_bytes() for path in bundle.path.iterdir()} == before
