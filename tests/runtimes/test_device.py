"""Bound tensors give what a plain run gives: on the CPU here, on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from attn_export.doctor.probe import cases, graph
from attn_export.errors import UsageError
from attn_export.runtimes import ort_cpu, ort_cuda
from attn_export.runtimes.base import LoadOptions
from attn_export.runtimes.device import CPU, CUDA, DeviceRun, FixedRun
from attn_export.runtimes.ort import OrtSession

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ort_cuda.availability().ok, reason=ort_cuda.availability().observed),
]
DEVICES = [CPU, pytest.param(CUDA, marks=gpu)]


def load(model: onnx.ModelProto, device: str, **provider: str) -> OrtSession:
    runtime = ort_cpu if device == CPU else ort_cuda
    return runtime.load(model.SerializeToString(), 1, LoadOptions(provider=provider))


def tensors(inputs: dict[str, np.ndarray], device: str) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(array, device=device) for name, array in inputs.items()}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def session(device: str) -> Iterator[OrtSession]:
    with load(graph(), device) as loaded:
        yield loaded


def test_tensors_go_in_and_come_out_without_the_host(session: OrtSession, device: str) -> None:
    run = DeviceRun(session, device)
    for inputs, right in cases():
        output = torch.from_dlpack(run.run(tensors(inputs, device))["output"])
        assert output.device.type == device
        np.testing.assert_allclose(output.cpu().numpy(), right, rtol=0, atol=2e-3)


def test_rows_that_do_not_follow_each_other_are_copied_first(
    session: OrtSession, device: str
) -> None:
    """A transposed view has the right shape and the wrong order in memory."""
    (inputs, right), _ = cases()
    given = tensors(inputs, device)
    given["value"] = given["value"].mT.contiguous().mT
    assert not given["value"].is_contiguous()
    output = DeviceRun(session, device).run(given)["output"]
    np.testing.assert_allclose(torch.from_dlpack(output).cpu().numpy(), right, rtol=0, atol=2e-3)


@pytest.mark.parametrize("device", [pytest.param(CUDA, marks=gpu)], indirect=True)
def test_what_another_stream_writes_is_waited_for(session: OrtSession, device: str) -> None:
    (inputs, right), _ = cases()
    given = tensors(inputs, device)
    value = given["value"].clone()
    given["value"].zero_()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        given["value"].copy_(value)
        output = DeviceRun(session, device).run(given)["output"]
    np.testing.assert_allclose(torch.from_dlpack(output).cpu().numpy(), right, rtol=0, atol=2e-3)


def test_numpy_arrays_are_tensors_too() -> None:
    with load(graph(), CPU) as session:
        (inputs, right), _ = cases()
        given = {name: np.asfortranarray(array) for name, array in inputs.items()}
        output = DeviceRun(session, CPU).run(given)["output"]
        np.testing.assert_allclose(output.numpy(), right, rtol=0, atol=1e-6)


def test_bound_inputs_are_checked_before_the_runtime_sees_them() -> None:
    with load(graph(), CPU) as session:
        (inputs, _), _ = cases()
        run = DeviceRun(session, CPU)
        with pytest.raises(UsageError, match="input 'key' is float64, the model takes float32"):
            run.run({**inputs, "key": torch.zeros(1, 1, 4, 8, dtype=torch.float64)})
        with pytest.raises(UsageError, match="input 'value' is missing"):
            run.run({"query": inputs["query"], "key": inputs["key"]})
        with pytest.raises(UsageError, match="'tokens' is 4 in input 'query' and 3 in 'key'"):
            run.run({**inputs, "key": inputs["key"][:, :, :3]})
        with pytest.raises(UsageError, match="input 'key' is no tensor that ONNX Runtime takes"):
            run.run({**inputs, "key": [1.0]})
    with pytest.raises(UsageError, match="this ort-cpu session is closed"):
        run.run(inputs)


def test_booleans_are_bound_as_booleans() -> None:
    values = [helper.make_tensor_value_info(name, TensorProto.BOOL, [3]) for name in "xy"]
    body = helper.make_graph([helper.make_node("Not", ["x"], ["y"])], "g", values[:1], values[1:])
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    with load(model, CPU) as session:
        for given in (torch.tensor([True, False, True]), np.array([True, False, True])):
            assert DeviceRun(session, CPU).run({"x": given})["y"].numpy().tolist() == [
                False, True, False,
            ]  # fmt: skip


def test_fixed_buffers_are_filled_anew_at_each_run(device: str) -> None:
    graphed = {"enable_cuda_graph": "1"} if device == CUDA else {}
    with load(graph(), device, **graphed) as session:
        (inputs, right), (other, _) = cases()
        run = FixedRun(session, inputs, device)
        for factor in (1, 2, 3, 1):
            scaled = {**inputs, "value": factor * inputs["value"]}
            np.testing.assert_allclose(run.run(scaled)["output"], factor * right, atol=1e-2, rtol=0)
        first = run.run(inputs)["output"]
        run.run({**inputs, "value": 2 * inputs["value"]})
        np.testing.assert_allclose(first, right, atol=2e-3, rtol=0)  # a copy, not the buffer
        with pytest.raises(UsageError) as raised:
            run.run(other)
        assert "this run takes query float32[1, 1, 4, 8]" in str(raised.value)
