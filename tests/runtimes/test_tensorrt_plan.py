"""What TensorRT would be told, worked out without TensorRT."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from attn_export.doctor.probe import graph
from attn_export.errors import UsageError
from attn_export.runtimes import graphs, onnx_reference, ort_tensorrt
from attn_export.runtimes import tensorrt_plan as plan
from attn_export.runtimes.base import LoadOptions, TensorSpec

INPUTS = [
    TensorSpec("image", "float32", ("batch", 3, 8, 8)),
    TensorSpec("tokens", "int64", ("batch", "length")),
    TensorSpec("fixed", "float32", (1, 4)),
]
RANGES = {"batch": (1, 1024), "length": (8, 512)}


def test_a_profile_names_the_shapes_of_every_dynamic_input() -> None:
    """The geometric mean of 1..1024 is 32, that of 8..512 is 64."""
    assert plan.profiles(INPUTS, RANGES) == {
        "trt_profile_min_shapes": "image:1x3x8x8,tokens:1x8",
        "trt_profile_opt_shapes": "image:32x3x8x8,tokens:32x64",
        "trt_profile_max_shapes": "image:1024x3x8x8,tokens:1024x512",
    }


def test_fixed_shapes_need_no_profile() -> None:
    assert plan.profiles(INPUTS[2:], {}) == {}


def test_a_dynamic_size_without_a_range_is_refused() -> None:
    with pytest.raises(UsageError) as raised:
        plan.profiles(INPUTS, {"batch": (1, 8)})
    assert str(raised.value) == (
        "TensorRT needs a range for 'length' of input 'tokens';"
        " export again with --dynamic INPUT=AXIS:MIN..MAX."
    )


@pytest.mark.parametrize(("low", "high", "middle"), [(1, 1, 1), (1, 3, 2), (7, 8, 7), (4, 4, 4)])
def test_what_is_usual_lies_in_the_range(low: int, high: int, middle: int) -> None:
    assert plan.usual(low, high) == middle


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A graph with its weights in a file beside it."""
    weight = onnx.numpy_helper.from_array(np.ones((8, 8), np.float32), "weight")
    model = graph()
    model.graph.initializer.append(weight)
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.data", size_threshold=0)
    return path


def test_an_engine_is_never_shared_by_two_graphs(stored: Path, tmp_path: Path) -> None:
    """Same names, same structure, other weights: the cached engine would answer for the other."""
    options = {"trt_profile_min_shapes": "query:1x1x1x8"}

    def key(path: Path, options: dict[str, str] = options, **others: str) -> str:
        given = {"versions": "TensorRT 101601", "device": "L4 8.9", **others}
        return plan.cache_key(path, options, **given)

    copy = Path(shutil.copytree(stored.parent, tmp_path / "b")) / "model.onnx"
    assert graphs.weight_files(graphs.read(copy)) == ["weights.data"]
    assert key(copy) == key(stored)
    keys = {
        key(stored),
        key(stored, device="H200 9.0"),
        key(stored, versions="TensorRT 101500"),
        key(stored, {"trt_profile_min_shapes": "query:1x1x2x8"}),
        key(stored, {**options, "trt_builder_optimization_level": "5"}),
    }
    weights = bytearray((copy.parent / "weights.data").read_bytes())
    weights[3] ^= 0x80
    (copy.parent / "weights.data").write_bytes(weights)
    keys.add(key(copy))
    changed = onnx.load(stored, load_external_data=False)
    changed.graph.node[0].attribute[0].i = 0
    onnx.save(changed, stored)
    keys.add(key(stored))
    assert len(keys) == 7


def test_engines_are_kept_apart_and_timings_together(stored: Path, tmp_path: Path) -> None:
    options = LoadOptions(ranges={"tokens": (1, 16)}, cache=tmp_path / "cache")
    made = ort_tensorrt.provider(stored, graphs.inputs(graphs.read(stored)), options, "v", "d")
    assert made.name == "TensorrtExecutionProvider"
    folder = Path(made.options["trt_engine_cache_path"])
    assert (folder.parent, len(folder.name)) == (tmp_path / "cache", 32)
    assert made.options["trt_timing_cache_path"] == str(tmp_path / "cache" / "timings")
    assert made.options["trt_profile_opt_shapes"] == ("query:1x1x4x8,key:1x1x4x8,value:1x1x4x8")
    assert not {"trt_fp16_enable", "trt_int8_enable"} & made.options.keys()
    ahead = ort_tensorrt.ahead_of_time(made).options
    assert ahead["trt_ep_context_file_path"] == str(folder / "compiled_ctx.onnx")
    assert not Path(ahead["trt_engine_cache_path"]).is_absolute()  # ONNX Runtime refuses one


def test_the_users_cache_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert plan.cache_folder(None) == Path("/somewhere/attn-export/tensorrt")


@pytest.mark.parametrize("option", ["trt_fp16_enable", "trt_bf16_enable", "trt_int8_enable"])
def test_another_precision_than_the_verified_one_is_refused(option: str) -> None:
    with pytest.raises(UsageError, match=f"{option} would compute in another precision"):
        plan.refuse_precision({option: "1"})
    plan.refuse_precision({option: "0"})


@pytest.mark.parametrize("runtime", [ort_tensorrt, onnx_reference])
def test_com_microsoft_ops_are_refused_before_anything_is_built(
    digits_bundle: Path, runtime: object
) -> None:
    with pytest.raises(UsageError) as raised:
        runtime.load(digits_bundle / "model.cpu.onnx")
    assert str(raised.value) == (
        f"{runtime.NAME} has no com.microsoft ops, and the graph has 5 of them, first Attention"
        " 'blocks.0.attn/Attention'; export with --lowering standard or decomposed, or for another"
        " --target."
    )
