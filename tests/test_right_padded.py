"""The promise of right padding: what keeps it, where it is written down, and who holds to it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from attn_export import right_padded
from attn_export.build import export
from attn_export.bundle import Bundle
from attn_export.errors import UsageError
from attn_export.fusing import fuse
from attn_export.runtimes import ort_cpu
from attn_export.sessions import load, load_stand_in
from attn_export.verifying.verification import verify
from tests.boundary import Cli
from tests.file_graphs import attention

RIGHT = np.array([[1, 1, 1, 1], [1, 0, 0, 0]])


@pytest.mark.parametrize(("rows", "keeps", "problem"), [
    (RIGHT, 1, ""), (1 - RIGHT, 0, ""), (RIGHT.astype(bool), 1, ""),
    ([[1, 0, 1, 0]], 1, "row, 0, that keeps a key behind its padding"),
    ([[1, 1], [0, 1]], 1, "row, 1, that does not begin with 1"),
    ([[1, 1], [0, 0]], 1, "row, 1, that does not begin with 1"),
    (RIGHT, 0, "row, 0, that does not begin with 0"),
    ([[1, 2]], 1, "other numbers than 0 and 1"),
    ([1, 1, 0], 1, "1 axes"),
])  # fmt: skip
def test_a_row_begins_with_a_key_and_keeps_none_behind_its_padding(
    rows: object, keeps: int, problem: str
) -> None:
    found = right_padded.broken(np.array(rows), keeps)
    assert problem in found
    assert bool(found) is bool(problem)


def test_a_mask_is_mended_to_as_many_keys_at_the_front() -> None:
    mask = np.array([[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]], np.int32)
    mended = right_padded.mended(mask, 1)
    assert mended.dtype == np.int32
    assert mended.tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert right_padded.mended(mask, 0).tolist() == [[0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 1, 1]]


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (3, 7), (9, 4)])
def test_drawn_lengths_differ_by_row_and_reach_from_one_to_all(batch: int, tokens: int) -> None:
    mask, lengths = right_padded.drawn(np.random.default_rng(0), (batch, tokens), 0)
    assert right_padded.broken(mask, 0) == ""
    assert (mask == 0).sum(axis=1).tolist() == lengths.tolist()
    assert len(set(lengths)) == min(batch, tokens)


def test_options_name_inputs_and_what_keeps_a_key() -> None:
    assert right_padded.parse(["mask", "padding=0", "other=1"]) == {
        "mask": 1, "padding": 0, "other": 1
    }  # fmt: skip
    for bad in ("mask=2", "=0", "mask="):
        with pytest.raises(UsageError, match="malformed"):
            right_padded.parse([bad])


MODEL = '''
import torch
from torch import nn

class Padded(nn.Module):
    """nn.MultiheadAttention, whose padding mask is True where a key is blocked."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x, padding):
        return self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]

def model():
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    Dim = torch.export.Dim
    axes = {0: Dim("batch", min=1, max=8), 1: Dim("tokens", min=1, max=32)}
    return Padded(), {"x": torch.randn(2, 5, 8), "padding": padding}, {"x": axes, "padding": axes}
'''


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("source") / "padded.py"
    path.write_text(MODEL)
    return f"{path}:model"


@pytest.fixture(scope="module")
def bundle(source: str, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("padded") / "bundle"
    return export(source, folder, targets=("cpu", "cuda"), right_padded=("padding=0",))


def test_the_manifest_tells_the_promise_and_the_stored_cases_keep_it(bundle: Bundle) -> None:
    told = {entry["name"]: entry for entry in bundle.manifest["inputs"]}
    assert told["padding"]["right_padded"] is True
    assert told["padding"]["keeps"] == 0
    assert "right_padded" not in told["x"]
    masks = [case.inputs["padding"] for case in bundle.cases()]
    assert [right_padded.broken(mask, 0) for mask in masks] == [""] * len(masks)
    assert any(mask.any() for mask in masks)
    sites = [site for target in bundle.targets() for site in target["sites"]]
    assert [site["mask"] for site in sites] == ["lengths", "lengths"]
    assert verify(bundle, ["ort-cpu", "torch"]).passed


@pytest.mark.parametrize("runtime", ["ort-cpu", "torch", "stand-in"])
def test_every_runtime_refuses_an_input_that_breaks_it(bundle: Bundle, runtime: str) -> None:
    if runtime == "stand-in":
        session = load_stand_in(bundle, bundle.target_for(["ort-cuda"], "model"))
    else:
        session = load(bundle, runtime)
    x = np.zeros((1, 4, 8), np.float32)
    with session:
        session.run({"x": x, "padding": np.array([[False, False, True, True]])})
        for hole in ([False, True, False, True], [True, False, False, False], [True] * 4):
            with pytest.raises(UsageError, match="made for right padding alone"):
                session.run({"x": x, "padding": np.array([hole])})


def test_an_example_of_the_other_polarity_is_told(source: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"does not begin with 1.*write padding=0") as caught:
        export(source, tmp_path / "bundle", right_padded=("padding",))
    assert not (tmp_path / "bundle").exists()
    assert caught.value.exit_code == 2


def test_a_fused_file_says_what_it_was_promised(tmp_path: Path) -> None:
    attention(tmp_path / "m.onnx", 17, mask=True)
    fused = fuse(tmp_path / "m.onnx", tmp_path / "out.onnx", right_padded=["mask"])
    assert [site["mask"] for site in fused.account["sites"]] == ["lengths"]
    assert "nothing checks when the file runs that 'mask' is right padded" in fused.notes
    made = onnx.load(tmp_path / "out.onnx")
    props = {prop.key: prop.value for prop in made.metadata_props}
    assert json.loads(props["attn_export.right_padded"]) == {"mask": 1}
    (node,) = [n for n in made.graph.node if n.domain == "com.microsoft"]
    assert (node.op_type, bool(node.input[3])) == ("Attention", True)
    inputs = {"x": np.random.default_rng(0).standard_normal((2, 4, 8)).astype(np.float32),
              "mask": RIGHT}  # fmt: skip
    answers = []
    for name in ("m.onnx", "out.onnx"):
        with ort_cpu.load(tmp_path / name) as session:
            answers.append(session.run(inputs)["y"])
    np.testing.assert_allclose(*answers, atol=1e-6)


def test_a_promise_that_changes_nothing_is_said(tmp_path: Path) -> None:
    attention(tmp_path / "m.onnx", 17, mask=True)
    model = onnx.load(tmp_path / "m.onnx")
    model.graph.input.append(
        onnx.helper.make_tensor_value_info("spare", onnx.TensorProto.INT64, ["batch", "tokens"])
    )
    onnx.save(model, tmp_path / "m.onnx")
    fused = fuse(tmp_path / "m.onnx", tmp_path / "out.onnx", right_padded=["spare"])
    assert any("no site's mask is made from 'spare' alone" in note for note in fused.notes)


def test_commands_take_it_and_refuse_what_is_no_input(cli: Cli, tmp_path: Path) -> None:
    attention(tmp_path / "m.onnx", 17, mask=True)
    seen = cli("inspect", "m.onnx", "--right-padded", "mask", "--json")
    assert [site["mask"] for site in seen.json["sites"]] == ["lengths"]
    ended = cli("fuse", "m.onnx", "-o", "out.onnx", "--right-padded", "masks")
    assert (ended.code, ended.sentence) == (
        2, "the model has no input 'masks' to be right padded; its inputs are x, mask."
    )  # fmt: skip
    assert not (tmp_path / "out.onnx").exists()
