"""A bundle that was broken on purpose says where: at that site, or at that node."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from attn_export import bundle as bundles
from attn_export import verify
from attn_export.build import export
from attn_export.parity.drift import Drift
from attn_export.parity.exposing import Exposable
from attn_export.parity.flow import Flow
from attn_export.parity.trace import FILE, read_trace
from attn_export.parity.yardstick import compared
from attn_export.runtimes import ort_cpu
from attn_export.runtimes.base import GraphBytes
from tests.boundary import Cli, edit_manifest, reseal
from tests.parity.graphs import Weight, mutate, set_attribute, site_node

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        self.proj = nn.Linear(32, 32)

    def forward(self, x, mask):
        B, S, D = x.shape
        q, k, v = (f(x).view(B, S, 4, 8).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        return self.proj(y.transpose(1, 2).reshape(B, S, D))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x, mask):
        x = x + self.attn(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, tokens, mask):
        for block in self.blocks:
            tokens = block(tokens, mask)
        return tokens

def build():
    torch.manual_seed(0)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1, 4:] = False
    return Encoder(), {"tokens": torch.randn(2, 6, 32), "mask": mask}
"""


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four blocks with a key mask, exported once. Take `broken` to change it."""
    folder = tmp_path_factory.mktemp("encoder")
    (folder / "encoder.py").write_text(MODEL)
    return export(f"{folder / 'encoder.py'}:build", folder / "bundle").path


Broken = Callable[[Callable[[onnx.ModelProto, Weight], None]], Path]


@pytest.fixture
def broken(encoder: Path, tmp_path: Path) -> Broken:
    def make(edit: Callable[[onnx.ModelProto, Weight], None]) -> Path:
        folder = Path(shutil.copytree(encoder, tmp_path / "broken"))
        mutate(folder, edit)
        return folder

    return make


def drift_of(folder: Path) -> Drift:
    result = verify(folder).runtimes["ort-cpu"]
    assert not result.passed
    assert result.drift is not None, result.undrifted
    return result.drift


def test_every_stored_value_of_a_sound_bundle_is_within_its_budget(encoder: Path) -> None:
    bundle = bundles.read(encoder)
    trace = read_trace(encoder / FILE)
    model = onnx.load(bundle.model_path(bundle.targets()[0]), load_external_data=False)
    graph = Exposable(model, lambda data: ort_cpu.load(GraphBytes(data, encoder)))
    assert {case.name for case in bundle.cases()} == trace.keys()
    for case in bundle.cases():
        names = [name for name in graph.values() if name in trace[case.name]]
        seen = compared(Flow(model), names, graph.run(case.inputs, names), trace[case.name])
        assert len(seen) == len(names) > 30
        assert [str(found) for found in seen.values() if found.drifts] == []


SITE = "blocks.2.attn"


def scale(model: onnx.ModelProto, _: Weight) -> None:
    set_attribute(site_node(model, SITE), "scale", 0.4)


def causal(model: onnx.ModelProto, _: Weight) -> None:
    set_attribute(site_node(model, SITE), "unidirectional", 1)


def mask_dropped(model: onnx.ModelProto, _: Weight) -> None:
    site_node(model, SITE).input[5] = ""


def heads_swapped(_: onnx.ModelProto, weight: Weight) -> None:
    values = weight(f"{SITE}/qkv.weight")[:, 64:]  # behind those of queries and keys
    values[:, :16] = np.roll(values[:, :16], 8, axis=1)  # heads of 8


@pytest.mark.parametrize("edit", [scale, causal, mask_dropped, heads_swapped])
def test_the_site_that_was_broken_is_named(
    broken: Broken, edit: Callable[[onnx.ModelProto, Weight], None]
) -> None:
    drift = drift_of(broken(edit))
    assert (drift.site, drift.cause, drift.yardstick) == (SITE, "graph or kernel", "pytorch")
    assert drift.place is not None
    assert (drift.place.op, drift.place.origin) == ("com.microsoft.Attention", "encoder.py:15")
    assert drift.deviation is not None
    assert drift.deviation.error > 1000 * drift.deviation.allowed


def test_a_site_is_named_on_a_case_that_shows_it(broken: Broken) -> None:
    assert drift_of(broken(mask_dropped)).case.endswith("masked")


def bad_weight(model: onnx.ModelProto, weight: Weight) -> None:
    node = next(
        node
        for node in model.graph.node
        if node.op_type == "MatMul"
        and any(p.value == "blocks.1.mlp.0" for p in node.metadata_props)
    )
    weight(node.input[1])[3, 5] += 1.0


def test_a_corrupted_weight_outside_of_attention_is_named_by_its_node(broken: Broken) -> None:
    drift = drift_of(broken(bad_weight))
    assert drift.place is not None
    assert (drift.site, drift.place.op, drift.place.module) == ("", "MatMul", "blocks.1.mlp.0")
    assert drift.deviation is not None
    assert drift.deviation.where is not None
    assert drift.deviation.where[-1] == 5  # the column of that weight
    assert drift.cause == "graph"  # ONNX's own evaluator gives the same with that weight


def test_a_bundle_without_a_trace_says_that_the_graph_is_wrong_and_no_more(broken: Broken) -> None:
    folder = broken(scale)
    (folder / FILE).unlink()
    edit_manifest(folder, lambda manifest: manifest["files"].pop(FILE))
    drift = drift_of(folder)
    assert (drift.yardstick, drift.cause, drift.deviation) == ("twin", "graph or kernel", None)


def test_a_broken_trace_leaves_the_verdict_as_it_is(broken: Broken) -> None:
    folder = broken(scale)
    (folder / FILE).write_bytes(b"nothing")
    reseal(folder)
    result = verify(folder).runtimes["ort-cpu"]
    assert not result.passed
    assert result.drift is None
    assert "is not a readable trace" in result.undrifted


def test_searching_leaves_the_bundle_as_it_was(broken: Broken) -> None:
    folder = broken(scale)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    drift_of(folder)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_a_sound_bundle_has_no_drift(encoder: Path) -> None:
    found = verify(encoder).runtimes["ort-cpu"]
    assert (found.drift, found.undrifted) == (None, "")
    assert found.to_json()["first_drift"] is None


def test_the_command_tells_it_below_the_table_and_in_json(broken: Broken, cli: Cli) -> None:
    folder = broken(scale)
    told = cli("verify", folder)
    assert told.code == 1
    first = " ".join(told.stdout.split())
    assert f"ort-cpu: First drift at site {SITE}, com.microsoft.Attention" in first
    assert "PyTorch in float64, stored at export" in first
    found = cli("verify", folder, "--json").json["runtimes"]["ort-cpu"]["first_drift"]
    assert (found["site"], found["op"], found["cause"]) == (
        SITE,
        "com.microsoft.Attention",
        "graph or kernel",
    )
    assert found["error"] > found["allowed"] > 0
    assert json.dumps(found, allow_nan=False)


def test_without_bisect_it_is_not_looked_for(broken: Broken, cli: Cli) -> None:
    ended = cli("verify", broken(scale), "--no-bisect", "--json")
    assert ended.code == 1
    assert ended.json["runtimes"]["ort-cpu"]["first_drift"] is None
