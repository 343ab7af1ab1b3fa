"""What is said of an NVIDIA machine: seen on a driver that was made for the test, and on none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from attn_export.doctor.probe import graph
from attn_export.errors import RuntimeUnavailable
from attn_export.runtimes import libraries, nvidia, ort_cuda, ort_tensorrt
from attn_export.runtimes.base import LoadOptions
from attn_export.runtimes.elf import needed
from attn_export.runtimes.nvidia import Device
from attn_export.runtimes.nvidia_stack import diagnose
from tests.runtimes.nvidia_fakes import LIBRARIES, fake_driver, fake_libraries, needs_gcc

CUDA = libraries.provider_library("cuda")
needs_gpu_package = pytest.mark.skipif(CUDA is None, reason="onnxruntime-gpu is not installed")


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    nvidia.device.cache_clear()
    yield
    nvidia.device.cache_clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder where libraries are looked for."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setattr(libraries, "CONFIGURED", ())
    monkeypatch.setattr(libraries, "LOADER", tmp_path / "none")
    return tmp_path


@needs_gpu_package
def test_the_libraries_that_a_provider_needs_are_read_from_its_header() -> None:
    assert CUDA is not None
    names = set(libraries.wanted(CUDA))
    assert {"libcublas.so.13", "libcudart.so.13", "libcuda.so.1"} <= names
    assert not {"libc.so.6", "libstdc++.so.6"} & names
    tensorrt = CUDA.with_name("libonnxruntime_providers_tensorrt.so")
    assert {"libnvinfer.so.10", "libnvonnxparser.so.10"} <= set(needed(tensorrt))


def test_what_is_no_library_needs_none(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no library")
    assert needed(tmp_path / "text") == []


def test_a_library_is_found_in_the_loaders_configuration(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    fake_libraries(tmp_path / "lib", "libcublas.so.13")
    (tmp_path / "more.conf").write_text(f"# CUDA\n{tmp_path / 'lib'}\n")
    (tmp_path / "main").write_text(f"include {tmp_path}/*.conf\n")
    assert list(libraries.configured(tmp_path / "main")) == [tmp_path / "lib"]


def test_a_library_of_a_package_comes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = folder / "site-packages" / "nvidia" / "cu13" / "lib"
    wheel.mkdir(parents=True)
    for place in (folder, wheel):
        fake_libraries(place, "libcublas.so.13")
    monkeypatch.syspath_prepend(folder / "site-packages")
    found = libraries.locate(["libcublas.so.13", "libcublas.so.12"])
    assert found == {"libcublas.so.13": str(wheel / "libcublas.so.13"), "libcublas.so.12": None}


def test_without_a_driver_that_is_said(folder: Path) -> None:
    device, why = nvidia.device()
    assert device is None
    assert why == "there is no NVIDIA driver on this machine (libcuda.so.1 was not found)"


@needs_gcc
def test_the_driver_is_asked_for_its_device(folder: Path) -> None:
    fake_driver(folder, version=13020, count=2)
    device, why = nvidia.device()
    assert (device, why) == (Device("Fake L4", "8.9", "13.2", 2), "")
    assert str(device) == "Fake L4 (compute capability 8.9) and 1 more"


@needs_gcc
@pytest.mark.parametrize(
    ("init", "count", "sentence"),
    [
        (100, 1, "the NVIDIA driver finds no device"),
        (0, 0, "the NVIDIA driver finds no device"),
        (803, 1, "the NVIDIA driver does not start (cuInit gives 803)"),
    ],
)
def test_a_driver_without_a_device_is_told_apart(
    folder: Path, init: int, count: int, sentence: str
) -> None:
    fake_driver(folder, init=init, count=count)
    assert nvidia.device() == (None, sentence)


def test_a_driver_that_is_no_library_is_told(folder: Path) -> None:
    fake_libraries(folder, "libcuda.so.1")
    device, why = nvidia.device()
    assert device is None
    assert why.startswith("the NVIDIA driver does not load (")


@needs_gcc
@needs_gpu_package
def test_missing_libraries_are_named_with_the_command_that_brings_them(folder: Path) -> None:
    fake_driver(folder)
    fake_libraries(folder, *LIBRARIES[2:])
    seen = ort_cuda.availability()
    assert not seen.ok
    assert seen.observed.endswith(
        "needs libcublasLt.so.13 and libcublas.so.13, which was not found"
    )
    assert seen.fix == "run `pip install 'attn-export[cuda]'`"
    assert seen.device == "Fake L4 (compute capability 8.9)"
    assert seen.libraries["libcudnn.so.9"] == str(folder / "libcudnn.so.9")


@needs_gcc
@needs_gpu_package
def test_libraries_of_cuda_12_are_told_from_those_of_13(folder: Path) -> None:
    fake_driver(folder)
    fake_libraries(folder, "libcublas.so.12", "libcudart.so.12", *LIBRARIES[2:3], *LIBRARIES[4:])
    observed = ort_cuda.availability().observed
    assert "needs libcublasLt.so.13 and libcublas.so.13 and libcudart.so.13" in observed
    assert observed.endswith(f"{folder / 'libcublas.so.12'} is of another major version")


@needs_gcc
@needs_gpu_package
def test_a_tensorrt_that_the_provider_was_not_built_for_is_named(folder: Path) -> None:
    fake_driver(folder)
    fake_libraries(folder, *LIBRARIES[:5], "libnvinfer.so.11", "libnvonnxparser.so.11")
    seen = ort_tensorrt.availability()
    assert seen.observed.startswith("TensorRT 11 is installed and onnxruntime-gpu ")
    assert seen.observed.endswith("is built for TensorRT 10")
    assert seen.fix == "run `pip install tensorrt-cu13==10.16.1.11`"


def test_a_driver_that_is_older_than_the_package_is_named() -> None:
    found = {"libcudart.so.13": "/lib/libcudart.so.13"}
    observed, fix = diagnose("onnxruntime-gpu 1.31.1", found, "12.8", "cuda")
    assert observed == (
        "the NVIDIA driver serves CUDA 12.8 and onnxruntime-gpu 1.31.1 is built for CUDA 13"
    )
    assert fix == "update the driver"
    assert diagnose("onnxruntime-gpu 1.31.1", found, "13.0", "cuda") == ("", "")


@needs_gcc
@needs_gpu_package
@pytest.mark.parametrize(
    ("runtime", "library"),
    [(ort_cuda, "libcublasLt.so.13"), (ort_tensorrt, "libnvinfer.so.10")],
)
def test_a_provider_that_does_not_load_is_never_replaced_by_the_cpu(
    folder: Path, runtime: ModuleType, library: str
) -> None:
    """Everything looks right, and nothing is: the libraries are empty files."""
    fake_driver(folder)
    fake_libraries(folder, *LIBRARIES)
    assert runtime.availability().ok
    options = LoadOptions(ranges={"tokens": (1, 8)}, cache=folder)
    with pytest.raises(RuntimeUnavailable) as raised:
        runtime.load(graph().SerializeToString(), 1, options)
    assert library in str(raised.value)
