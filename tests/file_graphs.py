"""Small .onnx files as exporters wrote them, old opsets too, for the tests of existing files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

D, N = 8, 2  # hidden size, heads
H = D // N


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    drawn = {name: rng.standard_normal((D, D)) / np.sqrt(D) for name in ("wq", "wk", "wv", "wo")}
    return {name: array.astype(np.float32) for name, array in drawn.items()}


def save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: dict[str, np.ndarray] | None = None,
    opset: int = 17,
    domains: Sequence[str] = (),
    functions: Sequence[onnx.FunctionProto] = (),
) -> Path:
    """Write a model of these nodes."""
    stored = [numpy_helper.from_array(a, name) for name, a in (constants or {}).items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, stored)
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    model = helper.make_model(graph, opset_imports=imports, functions=functions, ir_version=8)
    path.write_bytes(model.SerializeToString())
    return path


def floats(name: str, *shape: int | str | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def attention_nodes(opset: int, mask: bool = False, axis: int = -1) -> list[onnx.NodeProto]:
    """x (B, S, D) -> y, with sizes computed from Shape as TorchScript exports have it."""
    node = helper.make_node
    nodes = [
        node("Shape", ["x"], ["shape"]),
        node("Gather", ["shape", "zero"], ["batch"]),
        node("Gather", ["shape", "one"], ["tokens"]),
    ]
    for value in ("batch", "tokens"):
        if opset < 13:
            nodes.append(node("Unsqueeze", [value], [f"{value}_1d"], axes=[0]))
        else:
            nodes.append(node("Unsqueeze", [value, "axis0"], [f"{value}_1d"]))
    nodes.append(
        node("Concat", ["batch_1d", "tokens_1d", "heads_1d", "head_1d"], ["split"], axis=0)
    )
    nodes.append(node("Concat", ["batch_1d", "tokens_1d", "hidden_1d"], ["merged"], axis=0))
    for role in "qkv":
        nodes += [
            node("MatMul", ["x", f"w{role}"], [f"{role}_flat"]),
            node("Reshape", [f"{role}_flat", "split"], [f"{role}_BSNH"]),
            node("Transpose", [f"{role}_BSNH"], [role], perm=[0, 2, 1, 3]),
        ]
    nodes += [
        node("Transpose", ["k"], ["k_t"], perm=[0, 1, 3, 2]),
        node("MatMul", ["q", "k_t"], ["scores"]),
        node("Div", ["scores", "root"], ["scaled"]),
    ]
    last = "scaled"
    if mask:
        axes = {"axes": [1, 2]} if opset < 13 else {}
        wanted = ["mask"] if opset < 13 else ["mask", "axes12"]
        nodes += [
            node("Unsqueeze", wanted, ["mask_4d"], **axes),
            node("Cast", ["mask_4d"], ["kept"], to=TensorProto.BOOL),
            node("Where", ["kept", "scaled", "lowest"], ["filled"]),
        ]
        last = "filled"
    return [
        *nodes,
        node("Softmax", [last], ["weights"], name="attend", axis=axis),
        node("MatMul", ["weights", "v"], ["heads_out"]),
        node("Transpose", ["heads_out"], ["y_BSNH"], perm=[0, 2, 1, 3]),
        node("Reshape", ["y_BSNH", "merged"], ["y_flat"]),
        node("MatMul", ["y_flat", "wo"], ["y"]),
    ]


def constants(seed: int = 0) -> dict[str, np.ndarray]:
    numbers = {
        "zero": 0, "one": 1, "axis0": [0], "axes12": [1, 2], "heads_1d": [N], "head_1d": [H],
        "hidden_1d": [D],
    }  # fmt: skip
    sizes = {name: np.array(value, np.int64) for name, value in numbers.items()}
    scalars = {"root": np.float32(np.sqrt(H)), "lowest": np.float32(-np.inf)}
    return {**weights(seed), **sizes, **{name: np.array(v) for name, v in scalars.items()}}


def attention(path: Path, opset: int = 17, mask: bool = False, seed: int = 0) -> Path:
    """One site; `mask` (B, S) of int64 where there is one."""
    inputs = [floats("x", "batch", "tokens", D)]
    if mask:
        shape = ["batch", "tokens"]
        inputs.append(helper.make_tensor_value_info("mask", TensorProto.INT64, shape))
    outputs = [floats("y", "batch", "tokens", D)]
    return save(path, attention_nodes(opset, mask), inputs, outputs, constants(seed), opset)


def wide(path: Path) -> Path:
    """One site next to a weight of 4 KB."""
    nodes = [*attention_nodes(17)[:-1], helper.make_node("MatMul", ["y_flat", "broad"], ["y"])]
    numbers = {**constants(), "broad": np.ones((D, 128), np.float32)}
    return save(path, nodes, [floats("x", "batch", "tokens", D)],
                [floats("y", "batch", "tokens", 128)], numbers)  # fmt: skip


def unfusable(path: Path) -> Path:
    """The weights of one site are returned after some were set to 0, so that no op returns them."""
    outputs = [floats("y", "batch", "tokens", D), floats("weights", "batch", 2, "tokens", "tokens")]
    nodes = attention_nodes(17)
    (attend,) = [n for n in nodes if n.op_type == "Softmax"]
    attend.output[0] = "all"
    after = [
        helper.make_node("Greater", ["scaled", "zero_score"], ["seen"]),
        helper.make_node("Where", ["seen", "all", "zero_score"], ["weights"]),
    ]
    at = nodes.index(attend) + 1
    numbers = {**constants(), "zero_score": np.array(0, np.float32)}
    return save(path, [*nodes[:at], *after, *nodes[at:]], [floats("x", "batch", "tokens", D)],
                outputs, numbers)  # fmt: skip


def expected(x: np.ndarray, seed: int = 0) -> np.ndarray:
    """What `attention` computes, in float64."""
    w = {name: array.astype(np.float64) for name, array in weights(seed).items()}
    q, k, v = (
        (x.astype(np.float64) @ w[name]).reshape(*x.shape[:2], N, H).transpose(0, 2, 1, 3)
        for name in ("wq", "wk", "wv")
    )
    scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(H)
    weight = np.exp(scores - scores.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    return (weight @ v).transpose(0, 2, 1, 3).reshape(x.shape) @ w["wo"]


def beside(path: Path, threshold: int = 200) -> Path:
    """Move a file's weights, but not its sizes, into NAME.data beside it."""
    model = onnx.load(path)
    onnx.save_model(
        model, path, save_as_external_data=True, location=f"{path.name}.data",
        size_threshold=threshold,
    )  # fmt: skip
    return path
