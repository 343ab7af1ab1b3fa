"""Messages of the gRPC protocol: tensors in `contents`, or raw in the order of the inputs.

Source: Open Inference Protocol v2, grpc_predict_v2.proto.
"""

from __future__ import annotations

from typing import Any

from kserve import InferInput, InferRequest, InferResponse
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.infer_type import RequestedOutput

from attn_export.serve.refusals import BadRequest
from attn_export.serve.tensors import declared, from_bytes, from_numbers, to_bytes

CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents",
    "INT32": "int_contents", "INT64": "int64_contents", "UINT8": "uint_contents",
    "UINT16": "uint_contents", "UINT32": "uint_contents", "UINT64": "uint64_contents",
    "FP32": "fp32_contents", "FP64": "fp64_contents",
}  # fmt: skip


def decode(message: Any) -> InferRequest:
    """The request of a ModelInferRequest; each input's `data` is an array.

    Raises:
        BadRequest: it cannot be read.
    """
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise BadRequest(
            f"there are {len(message.inputs)} inputs and {len(raw)} raw contents",
            "give each input its own, in order",
        )
    names = [each.name for each in message.inputs]
    if len(set(names)) < len(names):
        raise BadRequest("an input is given more than once", "give each once")
    inputs = []
    for index, each in enumerate(message.inputs):
        dtype, shape = declared(each.name, each.datatype, list(each.shape))
        if raw and each.HasField("contents"):
            raise BadRequest(f"input '{each.name}' has contents and raw contents", "give one")
        if "shared_memory_region" in each.parameters:
            raise BadRequest(
                f"input '{each.name}' is said to lie in shared memory, which this server does not"
                " read",
                "send its data",
            )
        if raw:
            array = from_bytes(each.name, dtype, shape, raw[index])
        elif each.datatype in CONTENTS:
            numbers = list(getattr(each.contents, CONTENTS[each.datatype]))
            array = from_numbers(each.name, dtype, shape, numbers, finite=False)
        else:
            raise BadRequest(
                f"input '{each.name}' is {each.datatype}, which has no contents", "send it raw"
            )
        inputs.append(InferInput(each.name, list(shape), each.datatype, array))
    outputs = [RequestedOutput(each.name, dict(each.parameters)) for each in message.outputs]
    return InferRequest(
        message.model_name, inputs, message.id or None, from_grpc=True,
        request_outputs=outputs or None,
    )  # fmt: skip


def encode(response: InferResponse, message: Any) -> Any:
    """A ModelInferResponse: raw where the request was, or where a datatype has no contents."""
    answer = pb.ModelInferResponse(
        model_name=response.model_name, model_version=response.model_version, id=response.id
    )
    raw = bool(message.raw_input_contents) or any(
        output.datatype not in CONTENTS for output in response.outputs
    )
    for output in response.outputs:
        entry = answer.outputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
        if raw:
            answer.raw_output_contents.append(to_bytes(output.data))
        else:
            field = getattr(entry.contents, CONTENTS[output.datatype])
            field.extend(output.data.ravel().tolist())
    return answer
