"""What is installed where: the wheel in real environments, with and without a runtime or torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.boundary import ROOT, Ended, Environment, edit_manifest, run
from tests.needed import needs
from tests.small_bundles import IDENTITY, small_bundle

NO_PATH = {**os.environ, "PYTHONPATH": ""}


def call(place: Environment, *arguments: str | Path, path: Path | str = "") -> Ended:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    return run([place.script, *arguments], env=environment, cwd=place.path)


def evaluate(python: Path, code: str) -> str:
    return subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True, env=NO_PATH, cwd="/"
    ).stdout.strip()


def test_the_wheel_holds_weights_template_marker_and_licence_and_no_tests(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
    assert {
        "attn_export/py.typed",
        "attn_export/report/report.html",
        "attn_export/runtimes/web/package-lock.json",
        "attn_export/runtimes/web/package.json",
        "attn_export/runtimes/web/worker.mjs",
        "attn_export/models/weights/text_encoder_tokenizer.json",
        "attn_export/models/weights/translator_tokenizer.json",
        "attn_export/models/weights/vit_digits.safetensors",
        "attn_export/models/weights/vit_digits_heldout.safetensors",
    } <= sizes.keys()
    assert any(name.endswith("licenses/LICENSE") for name in sizes)
    assert {name.split("/")[0].split("-")[0] for name in sizes} == {"attn_export"}
    assert sizes["attn_export/models/weights/vit_digits.safetensors"] < 2_000_000


def test_base_has_neither_runtime_nor_torch(base_environment: Environment) -> None:
    code = "from importlib.util import find_spec as f; print(f('torch'), f('onnxruntime'))"
    assert evaluate(base_environment.python, code) == "None None"


def test_one_worker_runs_all_tests_of_environments(
    base_environment: Environment, request: pytest.FixtureRequest
) -> None:
    """Where a group does not reach pytest-xdist, one worker waits for the end of the other."""
    grouped = bool(request.config.getoption("loadgroup", default=False))
    assert request.node.nodeid.endswith("@environments") is grouped


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_without_a_runtime_one_sentence_and_3(
    base_environment: Environment, digits_bundle: Path, command: str
) -> None:
    ended = call(base_environment, command, digits_bundle)
    assert ended.code == 3
    assert ended.sentence == (
        "no onnxruntime package is installed; run `pip install 'attn-export[cpu]'`,"
        " or [gpu] on a machine with an NVIDIA GPU."
    )


@pytest.mark.parametrize("arguments", [["models"], ["--help"], ["--version"], ["export", "--help"]])
def test_what_needs_no_runtime_works_without_one(
    base_environment: Environment, arguments: list[str]
) -> None:
    ended = call(base_environment, *arguments)
    assert (ended.code, ended.stderr) == (0, "")
    assert ended.stdout


def test_production_verifies_without_torch(
    cpu_environment: Environment, digits_bundle: Path
) -> None:
    ended = call(cpu_environment, "verify", digits_bundle, "--json")
    assert (ended.code, ended.stderr.count("Error")) == (0, 0)
    assert ended.json["runtimes"]["ort-cpu"]["passed"] is True
    assert ended.json["runtimes"]["ort-cpu"]["metric"] == ended.json["metric"]["reference"]


def test_doctor_works_without_torch(cpu_environment: Environment) -> None:
    ended = call(cpu_environment, "doctor", "--json")
    assert ended.code == 0, ended.stderr
    found = ended.json["runtimes"]
    assert found["ort-cpu"]["status"] == found["onnx-reference"]["status"] == "pass"
    assert found["torch"]["status"] == found["torch-compile"]["status"] == "unavailable"
    assert found["torch"]["fix"] == "run `pip install 'attn-export[export]'`"
    assert found["ort-cuda"]["status"] == "unavailable"
    assert found["ort-cuda"]["observed"]


FALLBACK = """
from attn_export.doctor.probe import graph
from attn_export.errors import RuntimeUnavailable
from attn_export.runtimes.base import LoadOptions
from attn_export.runtimes.ort import CPU, OrtSession, Provider

model, providers = graph().SerializeToString(), [Provider("AzureExecutionProvider"), CPU]
try:
    OrtSession("ort-azure", model, providers, 1)
except RuntimeUnavailable as error:
    print(error)
with OrtSession("ort-azure", model, providers, 1, LoadOptions(allow_fallback=True)) as session:
    print(session.inference_session.get_providers()[0], session.fallback)
"""


def test_a_provider_that_loads_and_leaves_attention_to_the_cpu_is_refused(
    cpu_environment: Environment,
) -> None:
    """The Azure provider of the CPU package is first in the session's list, and runs no node."""
    told = "CPUExecutionProvider runs Attention 'attention', not AzureExecutionProvider"
    assert evaluate(cpu_environment.python, FALLBACK).splitlines() == [
        f"{told}; allow that with --allow-fallback, or export it again.",
        f"AzureExecutionProvider {told}",
    ]


def test_doctor_says_that_nothing_runs_where_there_is_no_runtime(
    base_environment: Environment,
) -> None:
    ended = call(base_environment, "doctor", "--runtime", "ort-cpu", "--json")
    assert (ended.code, ended.json["passed"]) == (3, False)
    assert (
        "Error: ort-cpu is not available because no onnxruntime package is installed; run `pip"
        in (ended.stderr)
    )


def test_doctor_finds_two_owners_of_onnxruntime(
    cpu_environment: Environment, onnxruntime_twins: Path
) -> None:
    ended = call(cpu_environment, "doctor", "--runtime", "ort-cpu", path=onnxruntime_twins)
    assert ended.code == 3
    assert "are both installed and own the same folder; run `pip uninstall -y" in ended.stdout


@needs("ort-web")
def test_a_browsers_bundle_is_verified_with_neither_torch_nor_onnxruntime(
    base_environment: Environment, tmp_path: Path
) -> None:
    """The wheel's worker, with the packages that npm put into a folder of the user's."""
    bundle = small_bundle(tmp_path / "b", IDENTITY)
    edit_manifest(bundle, lambda m: m["targets"][0].update(name="web", runtime="ort-web"))
    environment = {**os.environ, "PYTHONPATH": "", "ATTN_EXPORT_WEB": str(ROOT)}
    ended = run([base_environment.script, "verify", bundle, "--json"], env=environment)
    assert ended.code == 0, ended.stderr
    assert ended.json["runtimes"]["ort-web"]["passed"] is True


def test_production_says_no_to_a_wrong_bundle(
    cpu_environment: Environment, wrong_bundle: Path
) -> None:
    ended = call(cpu_environment, "verify", wrong_bundle)
    assert ended.code == 1
    assert "Error: ort-cpu differs from PyTorch, batch=3: output 'logits'" in ended.stderr
    assert "ort-cpu: First drift at Conv 'node_conv2d' (in patches" in ended.stdout


def test_production_benchmarks_without_a_baseline(
    cpu_environment: Environment, digits_bundle: Path
) -> None:
    ended = call(cpu_environment, "bench", digits_bundle, "--seconds", "0.3", "--json")
    assert ended.code == 0, ended.stderr
    assert ended.json["baseline"] is None
    assert list(ended.json["runtimes"]) == ["ort-cpu"]
    assert ended.json["runtimes"]["ort-cpu"]["median_ms"] > 0


def test_production_shows_the_sites_of_a_bundle(
    cpu_environment: Environment, digits_bundle: Path
) -> None:
    ended = call(cpu_environment, "inspect", digits_bundle, "--json")
    assert (ended.code, ended.json["total"], ended.json["lowered"]) == (0, 6, 6)


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["export", "vit-digits", "-o", "out"], "export"),
        (["run", "vit-digits"], "export"),
        (["inspect", "vit-digits"], "export"),
        (["verify", "BUNDLE", "--runtime", "torch"], "export"),
        (["bench", "BUNDLE", "--baseline", "torch"], "export"),
        (["inspect", "BUNDLE/model.cpu.onnx"], "graph"),
        (["fuse", "BUNDLE/model.cpu.onnx", "-o", "out"], "graph"),
        (["tune", "BUNDLE"], "graph"),
        (["report", "BUNDLE"], "report"),
        (["predict", "BUNDLE", "BUNDLE/model.cpu.onnx", "--engine", "ray", "-o", "out"], "ray"),
        (["serve", "BUNDLE"], "serve"),
    ],
)
def test_what_is_not_installed_is_named_with_its_extra(
    cpu_environment: Environment, digits_bundle: Path, arguments: list[str], extra: str
) -> None:
    given = [argument.replace("BUNDLE", str(digits_bundle)) for argument in arguments]
    ended = call(cpu_environment, *given)
    assert ended.code == 3
    assert ended.sentence.endswith(f"run `pip install 'attn-export[{extra}]'`.")
    assert "not installed" in ended.sentence
    assert not (cpu_environment.path / "out").exists()


def test_two_owners_of_onnxruntime_are_refused(
    cpu_environment: Environment, digits_bundle: Path, onnxruntime_twins: Path
) -> None:
    ended = call(cpu_environment, "verify", digits_bundle, path=onnxruntime_twins)
    assert ended.code == 3
    assert ended.sentence.startswith(
        "onnxruntime 1.31.1 and onnxruntime-gpu 1.31.1 are both installed and own the same folder;"
        " run `pip uninstall -y onnxruntime onnxruntime-gpu && pip install"
    )


IMPORT = """
import sys, time
begun = time.perf_counter()
import attn_export
seconds = time.perf_counter() - begun
print(seconds, "torch" in sys.modules, "onnxruntime" in sys.modules)
"""


@pytest.mark.parametrize("place", ["cpu", "development"])
def test_importing_is_quick_and_loads_neither_torch_nor_onnxruntime(
    cpu_environment: Environment, place: str
) -> None:
    python = cpu_environment.python if place == "cpu" else Path(sys.executable)
    found = [evaluate(python, IMPORT).split() for _ in range(5)]
    assert {tuple(row[1:]) for row in found} == {("False", "False")}
    assert min(float(row[0]) for row in found) < 0.2


def test_every_module_of_the_serving_side_imports_without_torch(
    cpu_environment: Environment,
) -> None:
    code = (
        "import importlib, pkgutil, sys, attn_export.bundle, attn_export.runtimes as runtimes\n"
        "for module in pkgutil.iter_modules(runtimes.__path__, 'attn_export.runtimes.'):\n"
        "    importlib.import_module(module.name)\n"
        "from attn_export import assert_parity, benchmark, verify\n"
        "print('torch' in sys.modules)"
    )
    assert evaluate(cpu_environment.python, code) == "False"


LOAD = """
import sys
import attn_export
with attn_export.load(sys.argv[1], warmup=True, verify=True) as session:
    cases = attn_export.bundle.read(attn_export.bundle.Path(sys.argv[1])).cases()
    print(session.run(cases[0].inputs)["logits"].shape, session.choice.runtime, flush=True)
print([name for name in ("torch", "onnx_ir", "onnxscript", "jinja2") if name in sys.modules])
"""


def test_production_loads_and_runs_a_bundle_without_torch(
    cpu_environment: Environment, digits_bundle: Path
) -> None:
    ended = run([cpu_environment.python, "-c", LOAD, digits_bundle], env=NO_PATH, cwd="/")
    assert (ended.code, ended.stderr) == (0, "")
    assert ended.stdout == "(1, 10) ort-cpu\n[]\n"


def test_loading_without_a_runtime_is_one_sentence(
    base_environment: Environment, digits_bundle: Path
) -> None:
    code = (
        "import sys, attn_export\n"
        "try:\n    attn_export.load(sys.argv[1])\n"
        "except attn_export.AttnExportError as error:\n    print(type(error).__name__, error)"
    )
    ended = run([base_environment.python, "-c", code, digits_bundle], env=NO_PATH, cwd="/")
    assert ended.stdout == (
        "RuntimeUnavailable ort-cpu is not available because no onnxruntime package is installed;"
        " run `pip install 'attn-export[cpu]'`, or [gpu] on a machine with an NVIDIA GPU.\n"
    )


def test_the_api_names_the_extra_too(cpu_environment: Environment) -> None:
    code = (
        "import attn_export\n"
        "try:\n    attn_export.export\n"
        "except attn_export.AttnExportError as error:\n    print(error)"
    )
    assert evaluate(cpu_environment.python, code).endswith(
        "run `pip install 'attn-export[export]'`."
    )
