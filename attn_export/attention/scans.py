"""Find recurrent linear attention in the Scan nodes of a graph, by running their bodies.

Gated Linear Attention (Yang et al., 2023), DeltaNet (Yang et al., 2024) and Gated DeltaNet (Yang et
al., 2024) are loops over time with a state (B, K, H, Hv). The body of such a loop is run once on
random numbers, and what each of its inputs is (query, key, value, decay, beta) is whatever makes
the recurrence of com.microsoft LinearAttention give the same state and output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from attn_export.attention.contraction import Factor
from attn_export.attention.layout import constant
from attn_export.attention.linear import SCAN, Recurrence
from attn_export.attention.reasons import NotLowerable, Reason
from attn_export.attention.sizes import evaluate, sizes
from attn_export.errors import one_line

Array = NDArray[np.float64]
BATCH, HEAD, GROUP, KEY, VALUE, TIME = range(6)
STATE = (BATCH, HEAD, KEY, VALUE)


@dataclass(frozen=True)
class _Roles:
    """Which scan input of a body is what, and how the recurrence uses them."""

    order: tuple[str, ...]
    log_decay: bool
    scale: float

    @property
    def rule(self) -> str:
        gated, delta = "decay" in self.order, "beta" in self.order
        return {(0, 0): "linear", (1, 0): "gated", (0, 1): "delta"}.get(
            (gated, delta), "gated_delta"
        )


def scan_recurrence(model: ir.Model, node: ir.Node) -> Recurrence | None:
    """The linear attention that a Scan of the main graph is, if it is one.

    Raises:
        NotLowerable: its body could not be run.
    """
    return _recurrence(node, model.opset_imports) if node.op_type == "Scan" else None


def _recurrence(node: ir.Node, opset_imports: Mapping[str, int]) -> Recurrence | None:
    body = node.attributes["body"].as_graph()
    count = node.attributes.get_int("num_scan_inputs", 0)
    flags = [value for name, value in node.attributes.items() if name.startswith("scan_")]
    if any(any(flag.as_ints()) for flag in flags):  # other axes, or backwards
        return None
    if len(node.inputs) != count + 1 or len(node.outputs) != 2 or not 3 <= count <= 5:
        return None
    if any(value is None or value.shape is None for value in (*node.inputs, *body.inputs)):
        return None
    roles = _roles(body, opset_imports)
    if roles is None:
        return None
    state, *scanned = [value for value in node.inputs if value is not None]
    named = {
        role: Factor(value, (TIME, *_labels(role, inner)))
        for role, value, inner in zip(roles.order, scanned, body.inputs[1:], strict=True)
    }
    result = node.outputs[1]
    grouped = len(sizes(result)) == 5
    output = Factor(result, (TIME, BATCH, HEAD, *((GROUP,) if grouped else ()), VALUE))
    return Recurrence(
        name=str(node.name), form=SCAN, rule=roles.rule, query=named["query"], key=named["key"],
        value=named["value"], output=_without_ones(output), tokens=(TIME,), key_axis=KEY,
        scale=roles.scale, decay=named.get("decay"), decay_is_log=roles.log_decay,
        beta=named.get("beta"), state=(state, node.outputs[0]),
    )  # fmt: skip


def _labels(role: str, value: ir.Value) -> tuple[int | None, ...]:
    """The axes of one time step of a role."""
    own = sizes(value)
    if role == "query":
        names: tuple[int, ...] = (BATCH, HEAD, GROUP, KEY) if len(own) == 4 else (BATCH, HEAD, KEY)
    else:
        names = (BATCH, HEAD, VALUE if role == "value" else KEY)[: len(own)]
    return tuple(None if size == 1 else n for n, size in zip(names, own, strict=True))


def _without_ones(factor: Factor) -> Factor:
    pairs = zip(factor.labels, sizes(factor.value), strict=True)
    return Factor(factor.value, tuple(None if size == 1 else name for name, size in pairs))


def _roles(body: ir.Graph, opset_imports: Mapping[str, int]) -> _Roles | None:
    """The roles with which the recurrence equals one run of the body; None where none do."""
    model = _standalone(body, opset_imports)
    shapes = _shapes(body)
    if model is None or shapes is None:
        return None
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape) / 2 for shape in shapes]
    dtypes = [value.dtype.numpy() for value in body.inputs if value.dtype is not None]
    feeds = [array.astype(dtype) for array, dtype in zip(arrays, dtypes, strict=True)]
    names = [value.name for value in model.graph.input]
    try:
        with np.errstate(all="ignore"):
            ran = ReferenceEvaluator(model).run(None, dict(zip(names, feeds, strict=True)))
    except Exception as error:  # whatever an operator of the evaluator raises
        raise NotLowerable(Reason.UNPROVABLE, f"its body was not run: {one_line(error)}") from error
    state, result = (np.asarray(array, np.float64) for array in ran)
    for order in _orders([array.shape for array in arrays]):
        given = dict(zip(order, arrays[1:], strict=True))
        for log_decay in (True, False) if "decay" in order else (True,):
            after, read = step(arrays[0], given, log_decay=log_decay)
            if not _equal(after, state) or read.size != result.size:
                continue
            scale = float(np.vdot(result, read) / np.vdot(read, read))
            if scale and _equal(scale * read, result.reshape(read.shape)):
                return _Roles(order, log_decay, round(scale, 6))
    return None


def step(state: Array, given: Mapping[str, Array], *, log_decay: bool) -> tuple[Array, Array]:
    """One token of com.microsoft LinearAttention: the state after it, and what its query reads.

    Args:
        state: (B, K, H, Hv).
        given: query (B, K, G, H) or (B, K, H), key (B, K, H), value (B, K, Hv), perhaps decay
            (B, K, H), (B, K, 1) or (B, K), and beta (B, K, 1) or (B, K).
    """
    key, value = given["key"], given["value"]
    if "decay" in given:
        kept = np.exp(given["decay"]) if log_decay else given["decay"]
        state = state * kept.reshape(*kept.shape[:2], -1, 1)
    if "beta" in given:
        stored = np.einsum("bkd,bkde->bke", key, state)
        value = given["beta"].reshape(*key.shape[:2], 1) * (value - stored)
    state = state + key[..., :, None] * value[..., None, :]
    query = given["query"].reshape(*key.shape[:2], -1, key.shape[2])
    return state, np.einsum("bkgd,bkde->bkge", query, state)


def _orders(shapes: Sequence[tuple[int, ...]]) -> Iterator[tuple[str, ...]]:
    """The assignments of roles to scan inputs that their shapes allow."""
    B, K, H, Hv = shapes[0]
    allowed: dict[str, Callable[[tuple[int, ...]], bool]] = {
        "query": lambda s: s == (B, K, H) or (len(s) == 4 and (*s[:2], s[3]) == (B, K, H)),
        "key": lambda s: s == (B, K, H),
        "value": lambda s: s == (B, K, Hv),
        "decay": lambda s: s in ((B, K, H), (B, K, 1), (B, K)),
        "beta": lambda s: s in ((B, K, 1), (B, K)),
    }
    roles = ("query", "key", "value")
    for gates in ((), ("decay",), ("beta",), ("decay", "beta")):
        if len(roles) + len(gates) == len(shapes) - 1:
            for order in permutations((*roles, *gates)):
                if all(allowed[role](s) for role, s in zip(order, shapes[1:], strict=True)):
                    yield order


def _equal(a: Array, b: Array) -> bool:
    return a.shape == b.shape and bool(np.allclose(a, b, rtol=1e-4, atol=1e-5))


def _shapes(body: ir.Graph) -> list[tuple[int, ...]] | None:
    """The shapes of one time step, symbols taken as small numbers that differ."""
    wanted = [sizes(value) for value in body.inputs]
    unknown = [size for shape in wanted for size in shape if not isinstance(size, int)]
    symbols = sorted({symbol.name for size in unknown for symbol in size.free_symbols})
    binding = {name: 2 + index for index, name in enumerate(symbols)}
    found = [
        tuple(evaluate(size if isinstance(size, int) else str(size), binding) for size in shape)
        for shape in wanted
    ]
    return found if len(found[0]) == 4 else None


def _standalone(body: ir.Graph, opset_imports: Mapping[str, int]) -> onnx.ModelProto | None:
    """The body with the constants that it takes from the graph around it."""
    inside = {id(value) for node in body for value in node.outputs} | {id(v) for v in body.inputs}
    read = [value for node in body for value in node.inputs if value is not None]
    captured = {id(value): value for value in read if id(value) not in inside}
    graph = ir.to_proto(body)
    for value in captured.values():
        array = constant(value)
        if array is None:
            return None
        if value.name not in {tensor.name for tensor in graph.initializer}:
            graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), value.name))
    opsets = [onnx.helper.make_opsetid(*item) for item in opset_imports.items()]
    return onnx.helper.make_model(graph, opset_imports=opsets)
