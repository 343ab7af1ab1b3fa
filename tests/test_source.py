"""Where a model comes from, and what is said where it does not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
import torch
from torch import nn

from attn_export.build import export
from attn_export.errors import AttnExportError, ExportError, UsageError
from attn_export.models.spec import ExportSpec
from attn_export.source import Source, eval_mode, resolve, restore_mode

HEAD = "import torch\nfrom torch import nn\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder; what is imported from it is forgotten again."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def source_file(folder: Path, body: str, name: str = "mine.py") -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(HEAD + dedent(body))
    return path


def refused(origin: object, kind: type[AttnExportError]) -> str:
    with pytest.raises(kind) as raised:
        resolve(str(origin))
    return str(raised.value)


@pytest.mark.parametrize("typed", ["vit-digit", "vit_digits", "ViT-digits", "digits"])
def test_an_unknown_name_is_answered_with_the_closest(typed: str) -> None:
    assert f"there is no model '{typed}'; did you mean vit-digits" in refused(typed, UsageError)


def test_a_name_close_to_nothing_is_answered_with_the_ways_there_are() -> None:
    sentence = refused("qqqqqqqqq", UsageError)
    assert "`attn-export models` lists the names" in sentence
    assert "path/file.py:factory" in sentence


def test_a_file_that_is_not_there(place: Path) -> None:
    assert refused("no.py:build", UsageError) == (
        "there is no file no.py; check the path before the colon."
    )


def test_a_module_that_is_not_there() -> None:
    assert "there is no module 'no_such'" in refused("no_such:build", UsageError)
    assert "there is no module 'json.no_such'" in refused("json.no_such:build", UsageError)


def test_an_attribute_that_is_not_there_is_answered_with_the_closest(place: Path) -> None:
    path = source_file(place, "def build_model(): ...")
    assert refused(f"{path}:build_modle", UsageError).endswith("did you mean 'build_model'.")


def test_an_attribute_that_is_not_callable(place: Path) -> None:
    path = source_file(place, "model = 3")
    assert "is not callable; name a function" in refused(f"{path}:model", UsageError)


def test_a_file_that_needs_a_package_that_is_missing(place: Path) -> None:
    path = source_file(place, "import no_such_package")
    assert "failed: there is no module 'no_such_package'; install it" in refused(
        f"{path}:build", ExportError
    )


@pytest.mark.parametrize(
    ("body", "seen"),
    [
        ("raise ValueError('bad size\\nmore')", "raised ValueError: bad size (mine.py line 4)"),
        ("assert False", "raised AssertionError"),
        ("raise SystemExit(2)", "raised SystemExit: 2"),
        ("import sys; sys.exit('no weights')", "raised SystemExit: no weights"),
        ("import no_such_package", "raised ModuleNotFoundError: No module named 'no_such_package'"),
    ],
)
def test_a_factory_that_raises_is_one_sentence_with_its_line(
    place: Path, body: str, seen: str
) -> None:
    path = source_file(place, f"def build():\n    {body}\n")
    assert f"mine.py:build {seen}" in refused(f"{path}:build", ExportError)


@pytest.mark.parametrize(
    ("body", "seen"),
    [
        ("def build(:", "raised SyntaxError"),
        ("1 / 0", "raised ZeroDivisionError"),
        ("raise SystemExit", "raised SystemExit"),
    ],
)
def test_a_file_that_raises_when_imported(place: Path, body: str, seen: str) -> None:
    path = source_file(place, body)
    assert f"importing {path} {seen}" in refused(f"{path}:build", ExportError)


def test_a_factory_that_needs_arguments(place: Path) -> None:
    path = source_file(place, "def build(size): ...")
    assert "a factory takes no arguments" in refused(f"{path}:build", ExportError)


PLAIN = "def build():\n    return nn.Linear(4, 2), torch.ones(2, 4)\n"


def test_one_model_as_a_file_and_as_a_module_is_the_same(place: Path) -> None:
    path = source_file(place, PLAIN, "boxed/plain.py")
    source_file(place, "", "boxed/__init__.py")
    sources = [resolve(origin) for origin in (f"{path}:build", "boxed.plain:build")]
    first, second = (source.components["model"] for source in sources)
    assert [source.name for source in sources] == ["build", "build"]
    assert list(first.inputs) == list(second.inputs) == ["input"]
    assert torch.equal(first.module.weight, second.module.weight)


def test_weights_drawn_without_a_seed_are_the_same_in_every_process(place: Path) -> None:
    """A benchmark builds the model again in a process of its own."""
    path = source_file(place, PLAIN)
    state = torch.random.get_rng_state()
    first, second = (resolve(f"{path}:build").components["model"].module for _ in range(2))
    assert torch.equal(first.weight, second.weight)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("where", ["top", "body"])
def test_a_file_may_import_its_neighbours(place: Path, where: str) -> None:
    source_file(place, "SIZE = 3", "deep/neighbour.py")
    line = "from neighbour import SIZE"
    top, body = (line, "") if where == "top" else ("", line)
    path = source_file(
        place,
        f"{top}\ndef build():\n    {body}\n    return nn.Linear(SIZE, 1), torch.ones(1, SIZE)",
        "deep/mine.py",
    )
    before = list(sys.path)
    assert resolve(f"{path}:build").components["model"].module.in_features == 3
    assert sys.path == before


def test_a_module_may_stand_in_the_file_instead_of_a_factory(place: Path) -> None:
    path = source_file(place, "net = nn.Linear(4, 2)\nnet.example_inputs = torch.ones(2, 4)")
    assert resolve(f"{path}:net").components["model"].inputs["input"].shape == (2, 4)


def test_each_component_of_a_mapping_is_described(place: Path) -> None:
    path = source_file(place, PLAIN + "def both():\n    return {'a': build(), 'b': build()}\n")
    assert list(resolve(f"{path}:both").components) == ["a", "b"]


def test_an_input_that_is_not_needed_is_said(place: Path) -> None:
    path = source_file(place, PLAIN)
    notes = resolve(f"{path}:build", inputs=["input=float32[7,4]"]).notes
    assert notes == ["--input was not used, since the model comes with example inputs"]


def test_modes_are_restored_one_by_one() -> None:
    net = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()))
    net[1].eval()  # a frozen part of a model in training
    flags = eval_mode(net)
    assert not any(module.training for module in net.modules())
    restore_mode(flags)
    assert [m.training for m in net.modules()] == [True, True, False, False]


def training_source(raises: bool = False) -> tuple[Source, list[nn.Module]]:
    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no")

    shared = nn.Linear(4, 4)
    heads = [nn.Sequential(shared, nn.Dropout(0.5)), nn.Sequential(shared, nn.Linear(4, 2))]
    if raises:
        heads.append(nn.Sequential(Raises()))
    specs = {f"part{i}": ExportSpec(m, {"input": torch.ones(2, 4)}) for i, m in enumerate(heads)}
    return Source("two", "two", specs), [m for head in heads for m in head.modules()]


def test_a_model_in_train_mode_is_exported_in_eval_mode_restored_and_said(tmp_path: Path) -> None:
    source, modules = training_source()
    bundle = export(source, tmp_path / "bundle")
    assert "the module was in train mode; it is exported in eval mode" in bundle.manifest["notes"]
    assert all(module.training for module in modules)  # also the one that both parts share
    case = bundle.cases()[0]
    with torch.no_grad():
        expected = modules[0].eval()(torch.tensor(case.inputs["input"]))
    np.testing.assert_array_equal(case.outputs["output"], expected.numpy())


def test_modes_are_restored_after_an_export_that_fails(tmp_path: Path) -> None:
    source, modules = training_source(raises=True)
    with pytest.raises(ExportError):
        export(source, tmp_path / "bundle")
    assert all(module.training for module in modules)
    assert list(tmp_path.iterdir()) == []
