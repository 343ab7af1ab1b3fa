"""Bodies of REST requests and answers: JSON, with tensors in it or as bytes behind it.

Source: Open Inference Protocol v2, "Inference", and the binary tensor data extension, in which
`Inference-Header-Content-Length` is the length of the JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from kserve import InferInput, InferRequest, InferResponse
from kserve.protocol.infer_type import RequestedOutput

from attn_export.errors import one_line
from attn_export.serve.refusals import BadRequest
from attn_export.serve.tensors import Array, declared, from_bytes, from_numbers, to_bytes

LENGTH = "inference-header-content-length"
BINARY, SIZE, ALL_BINARY = "binary_data", "binary_data_size", "binary_data_output"
SHARED_MEMORY = "shared_memory_region"


def decode(body: bytes, length: str | None, model: str) -> InferRequest:
    """The request; each input's `data` is an array.

    Args:
        length: the header's value, None where it was not given.

    Raises:
        BadRequest: it cannot be read.
    """
    header, tensors = _split(body, length)
    try:
        fields = orjson.loads(header)
    except orjson.JSONDecodeError as error:
        raise BadRequest(
            f"the body is not JSON ({one_line(error)})",
            "send JSON, and its length in Inference-Header-Content-Length where tensors follow",
        ) from error
    if not isinstance(fields, dict):
        raise BadRequest("the body is no JSON object", "send one with 'inputs'")
    inputs = []
    for entry in _objects(fields, "inputs", required=True):
        array, tensors = _input(entry, tensors)
        inputs.append(InferInput(entry["name"], list(array.shape), entry["datatype"], array))
    if len(tensors):
        raise BadRequest(
            f"{len(tensors)} bytes follow that belong to no input", f"give each input its {SIZE}"
        )
    outputs = [
        RequestedOutput(entry["name"], _parameters(entry))
        for entry in _objects(fields, "outputs", required=False)
    ]
    name = fields.get("id")
    if name is not None and not isinstance(name, str):
        raise BadRequest("'id' is no text", "give a text, or leave it out")
    return InferRequest(
        model, inputs, name, parameters=_parameters(fields), request_outputs=outputs or None
    )


def encode(response: InferResponse, request: InferRequest) -> tuple[bytes, int | None]:
    """The answer's body, and the length of its JSON where bytes follow it.

    What is not finite is null in JSON, which has no word for it; it is itself in bytes.
    """
    wanted = {output.name: output.binary_data for output in request.request_outputs or ()}
    default = bool((request.parameters or {}).get(ALL_BINARY))
    entries, tensors = [], list[bytes]()
    for output in response.outputs:
        entry = {"name": output.name, "datatype": output.datatype, "shape": output.shape}
        binary = wanted.get(output.name)
        if default if binary is None else binary:
            tensors.append(to_bytes(output.data))
            entry["parameters"] = {SIZE: len(tensors[-1])}
        else:
            entry["data"] = output.data.ravel()
        entries.append(entry)
    fields = {
        "id": response.id,
        "model_name": response.model_name,
        "model_version": response.model_version,
        "outputs": entries,
    }
    header = orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)
    return (b"".join([header, *tensors]), len(header)) if tensors else (header, None)


def _split(body: bytes, length: str | None) -> tuple[memoryview, memoryview]:
    whole = memoryview(body)
    if length is None:
        return whole, whole[:0]
    digits = length.isascii() and length.isdigit() and len(length) <= 12
    if not digits or int(length) > len(body):
        raise BadRequest(
            f"Inference-Header-Content-Length is '{length[:12]}', the body has {len(body)} bytes",
            "give the length of the JSON, and send all of the body",
        )
    return whole[: int(length)], whole[int(length) :]


def _input(entry: Mapping[str, Any], tensors: memoryview) -> tuple[Array, memoryview]:
    """The array of an input, and the bytes that are left for those behind it."""
    name, parameters = entry["name"], _parameters(entry)
    dtype, shape = declared(name, entry.get("datatype"), entry.get("shape"))
    if SHARED_MEMORY in parameters:
        raise BadRequest(
            f"input '{name}' is said to lie in shared memory, which this server does not read",
            "send its data",
        )
    size = parameters.get(SIZE)
    if (size is None) == ("data" not in entry):
        raise BadRequest(
            f"input '{name}' has {'no data' if size is None else 'data and bytes'}",
            f"give either 'data' or the parameter {SIZE}",
        )
    if size is None:
        return from_numbers(name, dtype, shape, entry["data"]), tensors
    if type(size) is not int or not 0 <= size <= len(tensors):
        raise BadRequest(
            f"input '{name}' is said to have {str(size)[:40]} bytes, and {len(tensors)} are left",
            "send the whole tensor",
        )
    return from_bytes(name, dtype, shape, tensors[:size]), tensors[size:]


def _objects(fields: Mapping[str, Any], key: str, *, required: bool) -> list[dict[str, Any]]:
    """A list of objects with different names."""
    found = fields.get(key, None if required else [])
    named = isinstance(found, list) and all(
        isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in found
    )
    if not named or (not found and required):
        raise BadRequest(f"'{key}' is no list of objects with names", "see the protocol's page")
    names = [entry["name"] for entry in found]
    if len(set(names)) < len(names):
        raise BadRequest(f"'{key}' has a name more than once", "give each once")
    return list(found)


def _parameters(entry: Mapping[str, Any]) -> dict[str, Any]:
    found = entry.get("parameters")
    if found is not None and not isinstance(found, dict):
        raise BadRequest("'parameters' is no object", "give an object, or leave it out")
    return found or {}
