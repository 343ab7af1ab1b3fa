"""The repository is what Triton's own protobuf reads, and its files are what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from attn_export.bundle import WEIGHTS, Bundle
from attn_export.deploy.triton import Serving, write_repository
from attn_export.errors import UsageError
from attn_export.production.rows import max_rows
from tests.boundary import Cli


def parsed(folder: Path) -> Any:
    text = (folder / "config.pbtxt").read_text()
    return text_format.Parse(text, model_config_pb2.ModelConfig())


@pytest.fixture(scope="module")
def digits_repository(digits: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("triton") / "repository"
    assert write_repository(digits, "cpu", folder, Serving(threads=2)) == ["vit-digits"]
    return folder / "vit-digits"


def test_the_configuration_is_a_model_config_of_triton(digits_repository: Path) -> None:
    config = parsed(digits_repository)
    assert (config.name, config.backend, config.max_batch_size) == ("vit-digits", "onnxruntime", 8)
    (given,), (answer,) = config.input, config.output
    assert (given.data_type, list(given.dims)) == (model_config_pb2.TYPE_FP32, [1, 8, 8])
    assert list(answer.dims) == [10]
    assert config.dynamic_batching.max_queue_delay_microseconds == 1000
    (group,) = config.instance_group
    assert (group.kind, group.count) == (model_config_pb2.ModelInstanceGroup.KIND_CPU, 1)
    assert config.parameters["intra_op_thread_count"].string_value == "2"


def test_the_version_folder_loads_from_where_it_lies(digits_repository: Path) -> None:
    model = digits_repository / "1" / "model.onnx"
    assert (model.parent / WEIGHTS).is_file()
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_inputs()] == [
        value.name for value in parsed(digits_repository).input
    ]


def test_each_warm_up_sample_holds_the_numbers_of_a_stored_case(
    digits: Bundle, digits_repository: Path
) -> None:
    samples = parsed(digits_repository).model_warmup
    cases = digits.cases()
    assert [sample.name for sample in samples] == [*(case.name for case in cases), "batch=8"]
    assert [sample.batch_size for sample in samples] == [1] * len(cases) + [8]
    for sample, case in zip(samples, cases, strict=False):
        for name, value in sample.inputs.items():
            path = digits_repository / "warmup" / value.input_data_file
            stored = np.fromfile(path, np.float32).reshape(tuple(value.dims))
            np.testing.assert_array_equal(stored, case.inputs[name][0])


@pytest.mark.parametrize(
    ("target", "backend", "kind"),
    [
        ("cpu", "onnxruntime", "KIND_CPU"),
        ("cuda", "onnxruntime", "KIND_GPU"),
        ("tensorrt", "onnxruntime", "KIND_GPU"),
        ("openvino", "openvino", "KIND_CPU"),
    ],
)
def test_each_target_has_its_backend(
    gpu_bundle: Bundle, tmp_path: Path, target: str, backend: str, kind: str
) -> None:
    write_repository(gpu_bundle, target, tmp_path / "r", Serving())
    config = parsed(tmp_path / "r" / "text-encoder")
    assert config.backend == backend
    (group,) = config.instance_group
    assert group.kind == model_config_pb2.ModelInstanceGroup.Kind.Value(kind)


def test_an_engine_covers_every_declared_size(gpu_bundle: Bundle, tmp_path: Path) -> None:
    write_repository(gpu_bundle, "tensorrt", tmp_path / "r", Serving(max_batch=4))
    config = parsed(tmp_path / "r" / "text-encoder")
    (accelerator,) = config.optimization.execution_accelerators.gpu_execution_accelerator
    options = dict(accelerator.parameters)
    inputs = gpu_bundle.manifest["inputs"]
    (tokens,) = {tuple(entry["ranges"][entry["shape"][1]]) for entry in inputs}
    for bound, rows, length in (("min", 1, tokens[0]), ("max", 4, tokens[1])):
        expected = ",".join(f"{entry['name']}:{rows}x{length}" for entry in inputs)
        assert options[f"trt_profile_{bound}_shapes"] == expected
    assert options["trt_engine_cache_enable"] == "true"
    assert "precision_mode" not in options  # fp16 comes from an fp16 graph


def test_rows_that_see_each_other_are_never_batched(digits: Bundle) -> None:
    mixed = Bundle(digits.path, {**digits.manifest, "rows_mix": ["model"]})
    assert max_rows(digits, "model", 16) == 16
    assert max_rows(mixed, "model", 16) == 0


def test_bad_requests_are_sentences(cli: Cli, digits: Bundle, tmp_path: Path) -> None:
    for arguments, sentence in [
        (["--target", "abacus"], "the bundle has no target 'abacus'"),
        (["--max-batch-size", "0"], "max batch 0"),
    ]:
        ended = cli("deploy", "triton", digits.path, "-o", "r", *arguments)
        assert (ended.code, sentence in ended.sentence) == (2, True)
        assert not (tmp_path / "r").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(UsageError, match="exists"):
        write_repository(digits, "cpu", tmp_path / "mine", Serving())
    (tmp_path / "mine" / "folder").mkdir()
    with pytest.raises(UsageError, match="is not a model repository"):
        write_repository(digits, "cpu", tmp_path / "mine", Serving(), overwrite=True)
    assert (tmp_path / "mine" / "file").exists()
