"""Each exit code, reached by a real invocation; each error is one sentence with a way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.boundary import Cli, edit_manifest


def test_0_a_good_bundle(cli: Cli, digits_bundle: Path) -> None:
    ended = cli("verify", digits_bundle)
    assert (ended.code, ended.stderr) == (0, "")
    assert "passed" in ended.stdout
    assert "Accuracy on 360 held-out samples: PyTorch 98.61%, ort-cpu 98.61% (the same)" in (
        ended.stdout
    )


def test_quiet_prints_nothing_where_all_is_well(cli: Cli, digits_bundle: Path) -> None:
    ended = cli("verify", digits_bundle, "-q")
    assert (ended.code, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize("command", [["verify"], ["bench", "--seconds", "0.2"]])
def test_1_a_bundle_whose_answers_are_wrong(
    cli: Cli, wrong_bundle: Path, command: list[str]
) -> None:
    ended = cli(*command, wrong_bundle)
    assert ended.code == 1
    assert ended.sentence.startswith("ort-cpu ")
    assert "differs from PyTorch, batch=" in ended.sentence
    assert "FAILED" in ended.stdout or "parity failed" in ended.stdout


def test_1_tolerances_that_nothing_meets(cli: Cli, digits_bundle: Path) -> None:
    ended = cli("verify", digits_bundle, "--rtol", "0", "--atol", "0")
    assert ended.code == 1
    assert "Allowances replaced by --atol 0.0 --rtol 0.0" in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["export", "vit-digit", "-o", "b"], "no model 'vit-digit'; did you mean vit-digits"),
        (["export", "no.py:build", "-o", "b"], "there is no file no.py"),
        (["export", "vit-digits", "-o", "b", "--target", "abacus"], "there is no target 'abacus'"),
        (["export", "vit-digits", "-o", "b", "--target", ","], "no target is named"),
        (["export", "vit-digits", "-o", "b", "--precision", "fp8"], "precision fp8 is not built"),
        (["export", "vit-digits", "-o", "b", "--dynamic", "x"], "--dynamic x does not parse"),
        (["inspect", "nothing"], "there is no model 'nothing'"),
        (["inspect", "BUNDLE", "--target", "cuda"], "the bundle has no target 'cuda'"),
        (["verify", "BUNDLE", "--runtime", "abacus"], "there is no runtime 'abacus'"),
        (["bench", "BUNDLE", "--runtime", "abacus"], "there is no runtime 'abacus'"),
        (["verify", "BUNDLE", "--rtol", "1"], "only one of --rtol and --atol is given"),
        (["verify", "BUNDLE", "--rtol", "nan", "--atol", "0"], "--rtol is nan"),
    ],
)  # fmt: skip
def test_2_usage(
    cli: Cli, digits_bundle: Path, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    ended = cli(*(a.replace("BUNDLE", str(digits_bundle)) for a in arguments))
    assert ended.code == 2
    assert sentence in ended.sentence
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["run", "export"])
def test_2_an_output_that_exists(cli: Cli, tmp_path: Path, command: str) -> None:
    (tmp_path / "out").mkdir()
    ended = cli(command, "vit-digits", "-o", "out")
    assert ended.code == 2
    assert ended.sentence == f"{tmp_path / 'out'} exists; choose another -o, or add --overwrite."


def test_2_overwrite_does_not_take_a_foreign_folder(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    ended = cli("export", "vit-digits", "-o", "out", "--overwrite")
    assert ended.code == 2
    assert "is not a bundle, so it is not overwritten" in ended.sentence
    assert (tmp_path / "out" / "thesis.tex").read_text() == "mine"


def test_3_both_onnxruntime_packages(
    cli: Cli, digits_bundle: Path, onnxruntime_twins: Path, tmp_path: Path
) -> None:
    for arguments in (["verify", digits_bundle], ["export", "vit-digits", "-o", "b"]):
        ended = cli(*arguments, env={"PYTHONPATH": str(onnxruntime_twins)})
        assert ended.code == 3
        assert "are both installed and own the same folder; run `pip uninstall" in ended.sentence
    assert list(tmp_path.iterdir()) == []


FAILING = """
import torch
from torch import nn

def raises():
    raise ValueError("no weights today")

class Noisy(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, 0.5)  # stays on in eval mode

class Raises(nn.Module):
    def forward(self, x):
        raise KeyError("positions")

def noisy():
    return Noisy(), torch.ones(2, 4)

def broken():
    return Raises(), torch.ones(2, 4)
"""


@pytest.mark.parametrize(
    ("factory", "sentence"),
    [
        ("raises", "raised ValueError: no weights today (failing.py line 6)"),
        (
            "noisy",
            "stays random in eval mode; pass training=self.training, so that eval() turns it off",
        ),
        ("broken", "the model raised KeyError on its example inputs: 'positions'"),
    ],
)
def test_4_a_model_that_does_not_export_leaves_nothing(
    cli: Cli, tmp_path: Path, factory: str, sentence: str
) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    ended = cli("export", f"failing.py:{factory}", "-o", "out")
    assert ended.code == 4
    assert sentence in ended.sentence
    assert {path.name for path in tmp_path.iterdir()} <= {"failing.py", "__pycache__"}


@pytest.mark.parametrize("command", ["verify", "bench", "report", "inspect"])
def test_5_a_bundle_that_was_changed(cli: Cli, bundle_copy: Path, command: str) -> None:
    with (bundle_copy / "weights.data").open("ab") as file:
        file.write(b"x")
    ended = cli(command, bundle_copy)
    assert ended.code == 5
    assert ended.sentence == (
        f"{bundle_copy / 'weights.data'} is not the file that was exported;"
        " copy the whole bundle again."
    )


def test_5_no_bundle_and_another_format(cli: Cli, bundle_copy: Path) -> None:
    assert cli("verify", "nowhere").sentence.startswith("nowhere is not a bundle")
    edit_manifest(bundle_copy, lambda manifest: manifest.update(format="attn-export-bundle/2"))
    ended = cli("verify", bundle_copy)
    assert (ended.code, "has format 'attn-export-bundle/2'" in ended.sentence) == (5, True)


@pytest.mark.parametrize("content", [None, b"not an onnx file"])
def test_5_an_onnx_file_that_is_none(cli: Cli, tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "m.onnx").write_bytes(content)
    assert cli("inspect", "m.onnx").code == 5


def test_5_a_full_disk_leaves_nothing(cli: Cli, tmp_path: Path) -> None:
    """No file may grow beyond 100 KB, which the kernel enforces; the weights have 1.2 MB."""
    (tmp_path / "place").mkdir()
    ended = cli("export", "vit-digits", "-o", "place/out", preexec_fn=_small_files)
    assert ended.code == 5
    assert "could not be written (File too large); free some space" in ended.sentence
    assert list((tmp_path / "place").iterdir()) == []


def test_5_a_full_disk_keeps_the_bundle_that_was_there(cli: Cli, bundle_copy: Path) -> None:
    ended = cli("export", "vit-digits", "-o", bundle_copy, "--overwrite", preexec_fn=_small_files)
    assert ended.code == 5
    assert cli("verify", bundle_copy).code == 0


def _small_files() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def test_3_a_torch_that_does_not_import(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libtorch.so is missing')")
    ended = cli("export", "vit-digits", "-o", "out", env={"PYTHONPATH": str(tmp_path)})
    assert ended.code == 3
    assert ended.sentence.startswith("torch is installed and does not import (libtorch.so is")
    assert not (tmp_path / "out").exists()
