"""Count the attention of a graph, knowing nothing of how sites are found.

A softmax counts where the axis that it normalises is later contracted with values that depend on
an input: that is a weighted mean. One whose result is returned (a classifier) or contracted with
constants (a distribution over fixed bins) does not. Existing attention nodes count as they are.
Only this file and ONNX's definitions of the operators decide; the finder is checked against it.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

ATTENTION_OPS = {
    ("", "Attention"),
    ("com.microsoft", "Attention"),
    ("com.microsoft", "MultiHeadAttention"),
    ("com.microsoft", "GroupQueryAttention"),
    ("com.microsoft", "PackedAttention"),
    ("com.microsoft", "PackedMultiHeadAttention"),
    ("com.microsoft", "DecoderMaskedMultiHeadAttention"),
    ("com.microsoft", "SparseAttention"),
    ("com.microsoft", "PagedAttention"),
}
ELEMENTWISE = {
    "Add", "Cast", "CastLike", "Clip", "Div", "Dropout", "Expand", "Identity", "Max", "Min", "Mul",
    "QuantizeLinear", "DequantizeLinear", "Relu", "Sub", "Where",
}  # fmt: skip


def count(model: ir.Model) -> list[str]:
    """A name for each attention in the model, its subgraphs and its functions."""
    graphs = [*model.graphs(), *(graph for f in model.functions.values() for graph in (f.graph,))]
    found: list[str] = []
    for index, graph in enumerate({id(graph): graph for graph in graphs}.values()):
        for position, node in enumerate(graph):
            name = node.name or f"{node.op_type}_{index}_{position}"
            domain = "" if node.domain == "ai.onnx" else node.domain
            if (domain, node.op_type) in ATTENTION_OPS:
                found.append(name)
                continue
            weights = _normalised(node)
            if weights is not None and any(_contracted(*weights, set())):
                found.append(name)
    return found


def others(model: ir.Model) -> list[str]:
    """Attention that no softmax over keys gives away, as "kind: node name".

    Deformable attention samples its values (GridSample). Channel attention multiplies a feature map
    by a gate that was made from its own mean (Hu et al., 2018). Linear attention multiplies queries
    by a product of keys and values, or values by a masked product of queries and keys, with no
    softmax between (Katharopoulos et al., 2020); or it carries such a product as a loop's state.
    """
    found = []
    for graph in model.graphs():
        linear = [node for node in graph if _is_linear(node)]
        joined = {id(node): _joined(node, linear) for node in linear}
        for node in graph:
            if node.op_type == "GridSample":
                found.append(f"deformable: {node.name}")
            elif node.op_type == "Mul" and any(_is_channel_gate(v) for v in node.inputs):
                found.append(f"channel: {node.name}")
            elif node in joined.values() or _carries_a_product(node):
                found.append(f"linear: {node.name}")
    return found


def _is_linear(node: ir.Node) -> bool:
    """A contraction of values that all come from inputs, one of them with a product of two."""
    operands = _contraction(node)
    if len(operands) < 2 or not all(_depends_on_input(value, numbers=True) for value in operands):
        return False
    return any(_is_summary(value) for value in operands) or _is_masked_product(operands[0])


def _contraction(node: ir.Node) -> list[ir.Value]:
    """What a product sums over: MatMul, Einsum, or a Mul whose result is summed up."""
    product: ir.Node | None = node if node.op_type in ("MatMul", "Einsum") else None
    if node.op_type == "ReduceSum" and node.inputs[0] is not None:
        inner = node.inputs[0].producer()
        product = inner if inner is not None and inner.op_type == "Mul" else None
    return [] if product is None else [value for value in product.inputs if value is not None]


def _is_summary(value: ir.Value) -> bool:
    """keys^T @ values, summed up over the tokens or over those so far."""
    node, running = value.producer(), False
    while node is not None and node.op_type in _SUMMARY_OPS and node.inputs[0] is not None:
        running = running or node.op_type == "CumSum"
        node = node.inputs[0].producer()
        if node is not None and running and node.op_type == "Mul":
            break
    if node is None or not (node.op_type in ("MatMul", "Einsum") or running):
        return False
    return node.op_type in ("MatMul", "Einsum", "Mul") and _multiplies_data(node)


def _is_masked_product(value: ir.Value) -> bool:
    """queries @ keys^T with a part of it set to 0."""
    node, masked = value.producer(), False
    while node is not None and node.op_type in _MASK_OPS:
        data = [v for v in node.inputs if v is not None and _depends_on_input(v, numbers=True)]
        if len(data) != 1:
            return False
        masked = masked or node.op_type in ("Trilu", "Where", "Mul")
        node = data[0].producer()
    products = ("MatMul", "Einsum")
    return masked and node is not None and node.op_type in products and _multiplies_data(node)


def _multiplies_data(node: ir.Node) -> bool:
    return len(node.inputs) > 1 and all(
        _depends_on_input(value, numbers=True) for value in node.inputs
    )


def _joined(node: ir.Node, linear: list[ir.Node]) -> ir.Node:
    """The Add in which what a chunk holds and what lies before it meet; else the node itself."""
    for use in node.outputs[0].uses():
        producers = [value.producer() for value in use.node.inputs if value is not None]
        if use.node.op_type == "Add" and all(p in linear for p in producers):
            return use.node
    return node


def _carries_a_product(node: ir.Node) -> bool:
    """A Scan whose new state is a sum that is read by a product in the same step."""
    body = node.attributes["body"].as_graph() if node.op_type == "Scan" else None
    if body is None:
        return False
    for state in body.outputs[: len(node.inputs) - node.attributes.get_int("num_scan_inputs", 0)]:
        maker = state.producer()
        read = any(use.node.op_type in ("MatMul", "Einsum", "Mul") for use in state.uses())
        if read and maker is not None and maker.op_type == "Add" and (_rank(state) or 0) > 2:
            return True
    return False


_MASK_OPS = {"Cast", "Identity", "Mul", "Transpose", "Trilu", "Where"}
_SUMMARY_OPS = {
    "Add", "Cast", "CumSum", "Div", "Identity", "Mul", "Pad", "Reshape", "Slice", "Squeeze", "Sub",
    "Transpose", "Unsqueeze",
}  # fmt: skip


def _is_channel_gate(value: ir.Value | None) -> bool:
    """Sigmoid of layers over a mean of all positions."""
    node = value.producer() if value is not None else None
    gated = False
    while node is not None and node.inputs and node.inputs[0] is not None:
        if node.op_type in ("ReduceMean", "GlobalAveragePool"):
            return gated
        gated = gated or node.op_type in ("Sigmoid", "HardSigmoid")
        if node.op_type not in _GATE_OPS:
            return False
        node = node.inputs[0].producer()
    return False


_GATE_OPS = {
    "Add", "Conv", "Gemm", "HardSigmoid", "MatMul", "Relu", "Reshape", "Sigmoid", "Squeeze",
    "Unsqueeze", "Expand",
}  # fmt: skip


def _rank(value: ir.Value | None) -> int | None:
    return None if value is None or value.shape is None else len(value.shape)


def _normalised(node: ir.Node) -> tuple[ir.Value, int] | None:
    """A softmax's output and its axis: the op itself, or exp(x) / sum(exp(x)) written by hand."""
    output = node.outputs[0] if node.outputs else None
    rank = _rank(output)
    if output is None or rank is None:
        return None
    if node.op_type == "Softmax":
        return output, node.attributes.get_int("axis", -1) % rank
    if node.op_type != "Div" or node.inputs[0] is None or node.inputs[1] is None:
        return None
    top, bottom = node.inputs[0].producer(), _through(node.inputs[1])
    if top is None or top.op_type != "Exp" or bottom is None or bottom.op_type != "ReduceSum":
        return None
    if bottom.inputs[0] is not node.inputs[0]:
        return None
    axes = (
        ir.convenience.get_const_tensor(bottom.inputs[1])
        if len(bottom.inputs) > 1 and bottom.inputs[1]
        else None
    )
    return None if axes is None else (output, int(axes.numpy().reshape(-1)[0]) % rank)


def _through(value: ir.Value) -> ir.Node | None:
    """The producer, past guards against a sum of zero."""
    node = value.producer()
    while node is not None and node.op_type in ("Add", "Max", "Clip", "Cast", "Expand", "Identity"):
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    return node


def _depends_on_input(value: ir.Value | None, *, numbers: bool = False) -> bool:
    """Whether a value is computed from a graph input, and is not a weight.

    Args:
        numbers: from an input's numbers, and not from its sizes alone.
    """
    seen: set[int] = set()
    todo = [value]
    while todo:
        current = todo.pop()
        if current is None or id(current) in seen or current.is_initializer():
            continue
        seen.add(id(current))
        node = current.producer()
        if node is None:
            return True  # a graph input, or a value of the outer graph
        if not (numbers and node.op_type in ("Shape", "Size")):
            todo += node.inputs
    return False


def _contracted(value: ir.Value, axis: int, seen: set[tuple[int, int]]) -> Iterator[bool]:
    """Follow an axis to the places where it is summed over with another operand."""
    if (id(value), axis) in seen:
        return
    seen.add((id(value), axis))
    rank = _rank(value)
    for node, position in value.uses():
        output = node.outputs[0] if node.outputs else None
        out_rank = _rank(output)
        if rank is None or output is None:
            continue
        if node.op_type == "MatMul":
            contracted = rank - 1 if position == 0 else max(rank - 2, 0)
            if axis == contracted:
                yield _depends_on_input(node.inputs[1 - position])
            elif out_rank == rank:  # a mixing of something else, such as heads
                yield from _contracted(output, axis, seen)
        elif node.op_type == "Einsum":
            yield from _einsum_contracts(node, position, axis, seen)
        elif node.op_type == "Mul" and _summed(output, axis + (out_rank or rank) - rank):
            other = node.inputs[1 - position]
            yield _depends_on_input(other) and not _is_sampled(other)
        elif (moved := _follow(node, value, axis)) is not None:
            yield from _contracted(output, moved, seen)


def _is_sampled(value: ir.Value | None) -> bool:
    """Values taken from a map at computed places: deformable attention, which is listed apart."""
    node = value.producer() if value is not None else None
    while node is not None and node.op_type in ("Concat", "Reshape", "Transpose", "Unsqueeze"):
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    return node is not None and node.op_type == "GridSample"


def _einsum_contracts(
    node: ir.Node, position: int, axis: int, seen: set[tuple[int, int]]
) -> Iterator[bool]:
    left, _, right = node.attributes["equation"].as_string().replace(" ", "").partition("->")
    terms = left.split(",")
    if "." in left:
        yield True  # not taken apart: better one too many than one unseen
        return
    letter = terms[position][axis]
    if letter in right:
        yield from _contracted(node.outputs[0], right.index(letter), seen)
        return
    for i, term in enumerate(terms):
        if i != position and letter in term:
            yield _depends_on_input(node.inputs[i])


def _summed(value: ir.Value, axis: int) -> bool:
    rank = _rank(value)
    for node, _ in value.uses():
        if node.op_type == "ReduceSum" and rank and len(node.inputs) > 1 and node.inputs[1]:
            axes = ir.convenience.get_const_tensor(node.inputs[1])
            if axes is not None and axis in {int(i) % rank for i in axes.numpy().reshape(-1)}:
                return True
    return False


def _follow(node: ir.Node, value: ir.Value, axis: int) -> int | None:
    """Where an axis goes through a node that keeps it; None where it is lost."""
    rank, output = _rank(value), node.outputs[0]
    out_rank = _rank(output)
    if rank is None or out_rank is None or value.shape is None or output.shape is None:
        return None
    if node.op_type in ELEMENTWISE:
        return axis + out_rank - rank
    if node.op_type == "Transpose":
        perm = node.attributes["perm"].as_ints() if "perm" in node.attributes else None
        return list(perm).index(axis) if perm else rank - 1 - axis
    if node.op_type in ("Slice", "Split", "Concat", "ScatterND", "Pad"):
        return axis
    if node.op_type == "Conv" and axis >= 2 and _is_pointwise(node):
        return axis
    if node.op_type in ("Reshape", "Squeeze", "Unsqueeze", "Flatten"):
        return _reshaped(value.shape, output.shape, axis)
    return None


def _is_pointwise(node: ir.Node) -> bool:
    """A convolution that mixes channels (heads) alone."""
    kernel = node.inputs[1].shape if node.inputs[1] is not None else None
    strides = node.attributes.get_ints("strides", [1])
    return kernel is not None and set(kernel[2:]) == {1} and set(strides) == {1}


def _reshaped(before: ir.Shape, after: ir.Shape, axis: int) -> int | None:
    """An axis survives a reshape where its size stands with as many elements behind it."""

    def inner(shape: ir.Shape, position: int) -> tuple[int, tuple[str, ...]]:
        known, symbols = 1, []
        for size in shape[position + 1 :]:
            if isinstance(size, int):
                known *= size
            else:
                symbols.append(str(size.value))
        return known, tuple(sorted(symbols))

    for position in range(len(after)):
        if after[position] == before[axis] and inner(after, position) == inner(before, axis):
            return position
    return None
