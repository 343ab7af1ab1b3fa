"""Plugin execution providers: their registration call, on a package made here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from attn_export.doctor.probe import cases, graph
from attn_export.errors import RuntimeUnavailable
from attn_export.runtimes import ort_ep, table
from attn_export.runtimes.base import LoadOptions


def install(folder: Path, name: str, code: str) -> None:
    """A package `onnxruntime-ep-NAME` in a folder of sys.path."""
    module = f"onnxruntime_ep_{name}"
    (folder / module).mkdir(parents=True)
    (folder / module / "__init__.py").write_text(code)
    info = folder / f"{module}-0.1.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: onnxruntime-ep-{name}\nVersion: 0.1\n"
    )


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


CPU_PLUGIN = """
def get_ep_name(): return "CPUExecutionProvider"
def get_library_path(): raise AssertionError("it is registered already")
"""


def test_a_plugin_runs_on_the_devices_that_it_listed(site: Path) -> None:
    """ONNX Runtime lists its own CPU provider as it lists a plugin's device."""
    install(site, "here", CPU_PLUGIN)
    plugin = table.find("ort-ep:here")
    seen = plugin.availability()
    assert (seen.ok, seen.versions["onnxruntime-ep-here"]) == (True, "0.1")
    assert seen.device.startswith("CPU of ")
    with plugin.load(graph().SerializeToString(), 1, LoadOptions()) as session:
        assert session.placement() == {"CPUExecutionProvider": 1}
        for inputs, right in cases():
            np.testing.assert_allclose(session.run(inputs)["output"], right, rtol=0, atol=1e-6)


def test_installed_plugins_are_listed_and_names_of_others_are_not(site: Path) -> None:
    install(site, "listed", CPU_PLUGIN)
    meta = site / "onnxruntime_ep_meta-1.0.dist-info"
    meta.mkdir()
    meta.joinpath("METADATA").write_text("Name: onnxruntime-ep-meta\nVersion: 1.0\n")
    assert "ort-ep:listed" in ort_ep.installed()
    assert "ort-ep:meta" not in ort_ep.installed()
    assert "ort-ep:listed" in table.names()


@pytest.mark.parametrize(
    ("name", "code", "observed"),
    [
        ("absent", None, "onnxruntime-ep-absent is not installed"),
        ("broken", "raise OSError('libtbb.so.12 is missing')",
         "onnxruntime-ep-broken does not register (libtbb.so.12 is missing)"),
        ("lost", "def get_ep_name(): return 'LostProvider'\n"
                 "def get_library_path(): return '/nowhere/liblost.so'",
         "onnxruntime-ep-lost does not register ("),
    ],
)  # fmt: skip
def test_a_plugin_that_cannot_work_says_why(
    site: Path, name: str, code: str | None, observed: str
) -> None:
    if code is not None:
        install(site, name, code)
    with pytest.raises(RuntimeUnavailable) as raised:
        table.find(f"ort-ep:{name}").load(graph().SerializeToString())
    assert str(raised.value).startswith(f"ort-ep:{name} is not available because {observed}")


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("openvino", "openvino"),
        ("nv-tensorrt-rtx-cu13", "ort-tensorrt"),
        ("webgpu", "ort-tensorrt"),
    ],
)
def test_a_plugin_takes_the_graph_that_was_made_for_its_like(name: str, first: str) -> None:
    assert table.find(f"ort-ep:{name}").GRAPHS[0] == first


def test_the_registration_call_is_there() -> None:
    assert callable(onnxruntime.register_execution_provider_library)
