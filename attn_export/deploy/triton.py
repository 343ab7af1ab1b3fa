"""A Triton model repository from a bundle: one model a component.

REPOSITORY/NAME/config.pbtxt, NAME/1/model.onnx with its weights beside it, and NAME/warmup/ with
inputs that the bundle stores. Source: Triton's model_config.proto and the READMEs of its ONNX
Runtime and OpenVINO backends.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_export.bundle import WEIGHTS, Bundle
from attn_export.deploy.pbtxt import Enum, dumps, entries
from attn_export.errors import UsageError
from attn_export.production.rows import BATCH, max_rows, model_name, values
from attn_export.storage import staged

TYPES = {
    "bool": "TYPE_BOOL", "float16": "TYPE_FP16", "float32": "TYPE_FP32", "float64": "TYPE_FP64",
    "int8": "TYPE_INT8", "int16": "TYPE_INT16", "int32": "TYPE_INT32", "int64": "TYPE_INT64",
    "uint8": "TYPE_UINT8", "uint16": "TYPE_UINT16", "uint32": "TYPE_UINT32",
    "uint64": "TYPE_UINT64", "bfloat16": "TYPE_BF16",
}  # fmt: skip
BACKENDS = {"ort-cpu": "onnxruntime", "ort-cuda": "onnxruntime", "ort-tensorrt": "onnxruntime",
            "openvino": "openvino"}  # fmt: skip
ON_GPU = ("ort-cuda", "ort-tensorrt")
# Inside of Triton's container; an engine lives as long as what is mounted there.
ENGINES = "/var/cache/tensorrt"


@dataclass(frozen=True)
class Serving:
    """How Triton is to run a model.

    Attributes:
        max_batch: the most rows in one run; lower where the bundle allows fewer.
        max_delay_ms: how long a request may wait for others to share a run with.
        instances: copies of the model, on each GPU or on the CPU.
        threads: of one CPU instance; 0 lets the runtime choose.
    """

    max_batch: int = 8
    max_delay_ms: float = 1.0
    instances: int = 1
    threads: int = 0


def write_repository(
    bundle: Bundle, target: str, folder: Path, serving: Serving, *, overwrite: bool = False
) -> list[str]:
    """Write the repository; returns the names of its models.

    Raises:
        UsageError: no such target, one that Triton has no backend for, a number out of range, or
            the folder exists.
        FileError: it could not be written.
    """
    if serving.max_batch < 1 or serving.instances < 1 or serving.threads < 0:
        raise UsageError(
            f"max batch {serving.max_batch}, {serving.instances} instances and"
            f" {serving.threads} threads cannot be served",
            "give at least 1, 1 and 0",
        )
    targets = _targets(bundle, target)
    models = {model_name(bundle, entry["component"]): entry for entry in targets}
    if overwrite and folder.is_dir() and any(folder.iterdir()) and not _is_repository(folder):
        raise UsageError(
            f"{folder} is not a model repository, so it is not overwritten", "choose another -o"
        )
    with staged(folder, replace=overwrite) as stage:
        for name, entry in models.items():
            _write_model(bundle, entry, stage / name, name, serving)
    return list(models)


def _targets(bundle: Bundle, target: str) -> list[dict[str, Any]]:
    found = [entry for entry in bundle.targets() if entry["name"] == target]
    if not found:
        have = ", ".join(dict.fromkeys(entry["name"] for entry in bundle.targets()))
        raise UsageError(
            f"the bundle has no target '{target}'",
            f"name one of {have}, or export it with --target",
        )
    runtime = found[0]["runtime"]
    if runtime not in BACKENDS:
        raise UsageError(f"Triton has no backend for {runtime}", "name another --target")
    return found


def _is_repository(folder: Path) -> bool:
    return all((path / "config.pbtxt").is_file() for path in folder.iterdir() if path.is_dir())


def _write_model(
    bundle: Bundle, target: Mapping[str, Any], folder: Path, name: str, serving: Serving
) -> None:
    version = folder / "1"
    version.mkdir(parents=True)
    shutil.copyfile(bundle.model_path(target), version / "model.onnx")
    if (bundle.path / WEIGHTS).is_file():
        shutil.copyfile(bundle.path / WEIGHTS, version / WEIGHTS)
    samples = warmup(bundle, target, serving, folder / "warmup")
    config = {**model_config(bundle, target, name, serving), "model_warmup": samples}
    (folder / "config.pbtxt").write_text(dumps(config), encoding="utf-8")


def model_config(
    bundle: Bundle, target: Mapping[str, Any], name: str, serving: Serving
) -> dict[str, Any]:
    """The ModelConfig message, without its warm-up, as `pbtxt.dumps` takes it."""
    component, runtime = target["component"], target["runtime"]
    inputs, outputs = values(bundle, "inputs", component), values(bundle, "outputs", component)
    rows = max_rows(bundle, component, serving.max_batch)
    config: dict[str, Any] = {
        "name": name,
        "backend": BACKENDS[runtime],
        "default_model_filename": "model.onnx",
        "max_batch_size": rows,
        "input": [_tensor(entry, rows) for entry in inputs],
        "output": [_tensor(entry, rows) for entry in outputs],
        "version_policy": {"latest": {"num_versions": 1}},
        "instance_group": [
            {
                "kind": Enum("KIND_GPU" if runtime in ON_GPU else "KIND_CPU"),
                "count": serving.instances,
            }
        ],
    }
    if rows > 1:
        delay = round(serving.max_delay_ms * 1000)
        config["dynamic_batching"] = {"max_queue_delay_microseconds": delay}
    if runtime in ON_GPU:
        accelerator = _tensorrt(inputs, rows) if runtime == "ort-tensorrt" else _cuda()
        config["optimization"] = {
            "execution_accelerators": {"gpu_execution_accelerator": [accelerator]}
        }
    elif serving.threads:
        key = "intra_op_thread_count" if runtime == "ort-cpu" else "INFERENCE_NUM_THREADS"
        config["parameters"] = entries({key: {"string_value": str(serving.threads)}})
    return config


def _tensor(entry: Mapping[str, Any], rows: int) -> dict[str, Any]:
    if entry["dtype"] not in TYPES:
        raise UsageError(
            f"'{entry['name']}' is {entry['dtype']}, which Triton does not have",
            "export the model with another dtype",
        )
    sizes = entry["shape"][1:] if rows else entry["shape"]
    dims = [size if isinstance(size, int) else -1 for size in sizes]
    described = {"name": entry["name"], "data_type": Enum(TYPES[entry["dtype"]])}
    # Triton has no tensor without axes: a batch of single numbers is reshaped from one axis.
    return described | ({"dims": dims} if dims else {"dims": [1], "reshape": {"shape": []}})


def _tensorrt(inputs: Sequence[Mapping[str, Any]], rows: int) -> dict[str, Any]:
    """The engine covers every declared size, so that no request builds one."""
    options = {
        "trt_engine_cache_enable": "true",
        "trt_engine_cache_path": ENGINES,
        "trt_timing_cache_enable": "true",
        "trt_timing_cache_path": ENGINES,
    }
    if any(entry["ranges"] for entry in inputs):
        for bound, pick in (("min", _least), ("opt", _middle), ("max", _most)):
            shapes = ",".join(f"{entry['name']}:{_shape(entry, pick, rows)}" for entry in inputs)
            options[f"trt_profile_{bound}_shapes"] = shapes
    return {"name": "tensorrt", "parameters": entries(options)}


def _cuda() -> dict[str, Any]:
    # TF32 rounds to 10 bits; what the bundle allows was measured with float32.
    return {"name": "cuda", "parameters": entries({"use_tf32": "0"})}


def _least(low: int, high: int) -> int:
    return low


def _middle(low: int, high: int) -> int:
    return (low + high) // 2


def _most(low: int, high: int) -> int:
    return high


def _shape(entry: Mapping[str, Any], pick: Any, rows: int) -> str:
    sizes = []
    for size in entry["shape"]:
        if isinstance(size, str):
            low, high = entry["ranges"][size]
            high = min(high, rows) if size == BATCH and rows else high
            size = pick(low, max(low, high))
        sizes.append(str(size))
    return "x".join(sizes)


def warmup(
    bundle: Bundle, target: Mapping[str, Any], serving: Serving, folder: Path
) -> list[dict[str, Any]]:
    """One sample for each stored case, and one full batch; their data go to `folder`."""
    component = target["component"]
    rows = max_rows(bundle, component, serving.max_batch)
    cases = [case for case in bundle.cases() if case.component == component]
    samples = []
    for index, case in enumerate(cases):
        inputs = []
        for name, array in case.inputs.items():
            row = array[0] if rows else array
            folder.mkdir(exist_ok=True)
            (folder / f"{index}-{name}").write_bytes(row.tobytes())
            value = {
                "data_type": Enum(TYPES[row.dtype.name]),
                "dims": list(row.shape) or [1],
                "input_data_file": f"{index}-{name}",
            }
            inputs.append({"key": name, "value": value})
        samples.append({"name": case.name, "batch_size": 1, "inputs": inputs})
    if rows > 1 and samples:
        samples.append({**samples[0], "name": f"batch={rows}", "batch_size": rows})
    return samples
