"""Ways in which an exported graph goes wrong, each applied to a graph on purpose.

A mutation takes a graph and changes it in place; it fails loudly where the graph has nothing that
it could change. All of them leave a graph that loads and runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Graph = onnx.GraphProto
Mutate = Callable[[Graph], None]


@dataclass(frozen=True)
class Mutant:
    """A mutation of one model of `tests.parity.mutant_models`."""

    model: str
    name: str
    mutate: Mutate


def nodes(graph: Graph, op: str) -> list[onnx.NodeProto]:
    found = [node for node in graph.node if node.op_type == op]
    assert found, f"no {op} in the graph"
    return found


def constant(graph: Graph, name: str, values: object, dtype: type = np.int64) -> str:
    graph.initializer.append(numpy_helper.from_array(np.array(values, dtype), name))
    return name


def before(
    graph: Graph, node: onnx.NodeProto, position: int, op: str, *more: str, **attributes: object
) -> None:
    """Put a node of one output in front of a node's input."""
    value = node.input[position]
    made = f"{value}.{op}.{position}.{len(graph.node)}"
    place = next(i for i, other in enumerate(graph.node) if other is node or other == node)
    node.input[position] = made
    graph.node.insert(place, helper.make_node(op, [value, *more], [made], **attributes))


def attribute(op: str, name: str, value: object, index: int = 0) -> Mutate:
    def mutate(graph: Graph) -> None:
        node = nodes(graph, op)[index]
        kept = [a for a in node.attribute if a.name != name]
        old = [helper.get_attribute_value(a) for a in node.attribute if a.name == name]
        assert old != [value], f"{op} has {name}={value} already"
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])

    return mutate


def edited(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Mutate:
    """A stored tensor with other values."""

    def mutate(graph: Graph) -> None:
        (tensor,) = (t for t in graph.initializer if t.name == name)
        old = numpy_helper.to_array(tensor)
        new = change(old.copy()).astype(old.dtype)
        assert new.shape == old.shape
        assert not np.array_equal(new, old)
        tensor.CopyFrom(numpy_helper.from_array(new, name))

    return mutate


def constant_of(
    op: str, position: int, change: Callable[[np.ndarray], np.ndarray], index: int = 0
) -> Mutate:
    """A stored input of a node with other values."""

    def mutate(graph: Graph) -> None:
        edited(nodes(graph, op)[index].input[position], change)(graph)

    return mutate


def weight_of(bias: str, change: Callable[[np.ndarray], np.ndarray]) -> Mutate:
    """The matrix of the layer that adds `bias`, whose own name the exporter made up."""

    def mutate(graph: Graph) -> None:
        (add,) = (node for node in nodes(graph, "Add") if bias in node.input)
        product = next(node for node in graph.node if node.output[0] in add.input)
        edited(product.input[1], change)(graph)

    return mutate


def swapped_inputs(op: str, first: int, second: int, index: int = 0) -> Mutate:
    def mutate(graph: Graph) -> None:
        node = nodes(graph, op)[index]
        a, b = node.input[first], node.input[second]
        assert a != b
        node.input[first], node.input[second] = b, a

    return mutate


def without_input(op: str, position: int, index: int = 0) -> Mutate:
    def mutate(graph: Graph) -> None:
        node = nodes(graph, op)[index]
        assert node.input[position]
        node.input[position] = ""

    return mutate


def inserted(
    op: str, position: int, new: str, *, index: int = 0, extra: object = None, **attributes: object
) -> Mutate:
    """A node in front of an input; `extra` is a second, constant input of it."""

    def mutate(graph: Graph) -> None:
        more = []
        if extra is not None:
            dtype = np.float32 if isinstance(extra, float) else np.int64
            more = [constant(graph, f"extra.{len(graph.initializer)}", extra, dtype)]
        before(graph, nodes(graph, op)[index], position, new, *more, **attributes)

    return mutate


def gathered(op: str, position: int, axis: int, order: Sequence[int], index: int = 0) -> Mutate:
    """An axis of an input in another order."""
    return inserted(op, position, "Gather", index=index, extra=list(order), axis=axis)


def row_leaked(op: str, position: int, index: int = 0) -> Mutate:
    """Every row of the batch is given the first one's values."""

    def mutate(graph: Graph) -> None:
        node = nodes(graph, op)[index]
        value = node.input[position]
        ends = [constant(graph, f"leak.{n}", v) for n, v in (("a", [0]), ("b", [1]), ("c", [0]))]
        place = next(i for i, other in enumerate(graph.node) if other == node)
        made = [
            helper.make_node("Slice", [value, *ends], ["leak.first"]),
            helper.make_node("Shape", [value], ["leak.shape"]),
            helper.make_node("Expand", ["leak.first", "leak.shape"], ["leak.rows"]),
        ]
        node.input[position] = "leak.rows"
        for step, new in enumerate(made):
            graph.node.insert(place + step, new)

    return mutate


def tiled_heads(graph: Graph) -> None:
    """Key heads 0, 1 serve query heads 0, 1, 0, 1 where they should serve 0, 0, 1, 1."""
    for position in (1, 2):
        before(graph, nodes(graph, "Attention")[0], position, "Gather",
               constant(graph, f"tile.{position}", [0, 1, 0, 1]), axis=1)  # fmt: skip


def rolled(op: str, position: int, axis: int, index: int = 0) -> Mutate:
    """The last of an axis comes first, as a shift by one place does."""

    def mutate(graph: Graph) -> None:
        node = nodes(graph, op)[index]
        value = node.input[position]
        place = next(i for i, other in enumerate(graph.node) if other == node)
        names = {
            name: constant(graph, f"roll.{name}", [number])
            for name, number in (("last", -1), ("first", 0), ("end", 2**62), ("axis", axis))
        }
        tail, head = (
            [value, *(names[name] for name in part)]
            for part in (("last", "end", "axis"), ("first", "last", "axis"))
        )
        made = [
            helper.make_node("Slice", tail, ["tail"]),
            helper.make_node("Slice", head, ["head"]),
            helper.make_node("Concat", ["tail", "head"], ["rolled"], axis=axis),
        ]  # fmt: skip
        node.input[position] = "rolled"
        for step, new in enumerate(made):
            graph.node.insert(place + step, new)

    return mutate


def lower_right(graph: Graph) -> None:
    """The causal mask starts at the lower right: query i sees keys up to i + T - S."""
    node = nodes(graph, "Attention")[0]
    attribute("Attention", "is_causal", 0)(graph)
    node = nodes(graph, "Attention")[0]
    place = next(i for i, other in enumerate(graph.node) if other == node)
    query, key = node.input[0], node.input[1]
    zero, one = constant(graph, "lr.zero", 0), constant(graph, "lr.one", 1)
    minus = constant(graph, "lr.minus", [-1])
    made = [
        helper.make_node("Shape", [query], ["lr.q"], start=2, end=3),
        helper.make_node("Shape", [key], ["lr.k"], start=2, end=3),
        helper.make_node("Squeeze", ["lr.q"], ["lr.S"]),
        helper.make_node("Squeeze", ["lr.k"], ["lr.T"]),
        helper.make_node("Range", [zero, "lr.S", one], ["lr.i"]),
        helper.make_node("Range", [zero, "lr.T", one], ["lr.j"]),
        helper.make_node("Sub", ["lr.T", "lr.S"], ["lr.shift"]),
        helper.make_node("Add", ["lr.i", "lr.shift"], ["lr.last"]),
        helper.make_node("Unsqueeze", ["lr.last", minus], ["lr.column"]),
        helper.make_node("LessOrEqual", ["lr.j", "lr.column"], ["lr.mask"]),
    ]
    node.input.extend([""] * (3 - len(node.input)))
    node.input.append("lr.mask")
    for step, new in enumerate(made):
        graph.node.insert(place + step, new)


def softcap_after_mask(graph: Graph) -> None:
    """tanh over masked scores: -inf becomes -softcap, and masked keys leak weight."""
    tanh, where = nodes(graph, "Tanh")[0], nodes(graph, "Where")[0]
    scaled = next(node for node in graph.node if tanh.output[0] in node.input)
    capped, masked = scaled.output[0], where.output[0]
    mask_cut = tanh.input[0]
    where.input[2] = mask_cut
    tanh.input[0] = masked
    (softmax,) = nodes(graph, "Softmax")
    softmax.input[0] = capped
    order = list(graph.node)
    order.remove(where)
    later = [tanh, scaled]
    for node in later:
        order.remove(node)
    place = order.index(softmax)
    order[place:place] = [where, *later]
    del graph.node[:]
    graph.node.extend(order)


def halved(op: str, output: str) -> Mutate:
    """A runtime that works in half precision: an output of a node goes through float16."""

    def mutate(graph: Graph) -> None:
        (node,) = (n for n in nodes(graph, op) if output in n.output)
        place = next(i for i, other in enumerate(graph.node) if other == node)
        node.output[list(node.output).index(output)] = "half.in"
        to = {"half.out": TensorProto.FLOAT16, output: TensorProto.FLOAT}
        made = [
            helper.make_node("Cast", [value], [name], to=kind)
            for value, (name, kind) in zip(("half.in", "half.out"), to.items(), strict=True)
        ]
        for step, new in enumerate(made):
            graph.node.insert(place + 1 + step, new)

    return mutate


def heads_off(array: np.ndarray) -> np.ndarray:
    """The first two heads of four change places in a matrix of (D, 4 * H)."""
    size = array.shape[-1] // 4
    array[..., : 2 * size] = np.roll(array[..., : 2 * size], size, axis=-1)
    return array


def scaled(factor: float, at: tuple[int, ...] = ()) -> Callable[[np.ndarray], np.ndarray]:
    """All of an array, or one entry of it, times a factor."""

    def change(array: np.ndarray) -> np.ndarray:
        array[at] = array[at] * factor
        return array

    return change


def plus(number: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda array: array + number


ATTENTION: dict[str, Mutate] = {
    "scale dropped": attribute("Attention", "scale", 1.0),
    "scale of another head size": attribute("Attention", "scale", 8**-0.5),
    "softcap added": attribute("Attention", "softcap", 2.0),
    "one head of the query swapped": gathered("Attention", 0, 1, [1, 0, 2, 3]),
    "keys and values swapped": swapped_inputs("Attention", 1, 2),
    "queries and keys swapped": swapped_inputs("Attention", 0, 1),
    "batch row leaked into keys": row_leaked("Attention", 1),
    "batch row leaked into values": row_leaked("Attention", 2),
    "values one position off": rolled("Attention", 2, 2),
    "keys one position off": rolled("Attention", 1, 2),
}
LAYERS: dict[str, Mutate] = {
    "LayerNorm epsilon 1e-5 -> 1e-2": attribute("LayerNormalization", "epsilon", 1e-2),
    "LayerNorm epsilon 1e-5 -> 1e-3": attribute("LayerNormalization", "epsilon", 1e-3),
    "GELU by tanh": attribute("Gelu", "approximate", "tanh"),
}
BLOCK = {
    "query bias dropped": edited("query.bias", np.zeros_like),
    "value bias dropped": edited("value.bias", np.zeros_like),
    "norm weight dropped": edited("norm1.weight", np.ones_like),
    "heads of the output projection swapped": weight_of("out.bias", lambda a: heads_off(a.T).T),
    "one weight off by a percent": weight_of("value.bias", scaled(1.01, (3, 5))),
    "half precision in the output projection": halved("Add", "linear_3"),
}


def _named(model: str, *tables: dict[str, Mutate], skip: Sequence[str] = ()) -> list[Mutant]:
    rows = [(name, mutate) for table in tables for name, mutate in table.items()]
    return [Mutant(model, name, mutate) for name, mutate in rows if name not in skip]


MUTANTS: list[Mutant] = [
    *_named("causal", ATTENTION, LAYERS, BLOCK, skip=["keys one position off"]),
    *_named("causal", {"causal dropped": attribute("Attention", "is_causal", 0)}),
    *_named("grouped", {
        "heads tiled instead of interleaved": tiled_heads,
        "key heads swapped": gathered("Attention", 1, 1, [1, 0]),
        "every query given the first key head": gathered("Attention", 1, 1, [0, 0]),
        "causal added": attribute("Attention", "is_causal", 1),
        "scale dropped": attribute("Attention", "scale", 1.0),
    }),
    *_named("text_encoder", {
        "mask inverted": inserted("Attention", 3, "Not"),
        "mask dropped": without_input("Attention", 3),
        "mask dropped in the second layer": without_input("Attention", 3, index=1),
        "mask one position off": rolled("Attention", 3, 3),
        "mask of the first row for all": row_leaked("Attention", 3),
        "token ids one position off": rolled("Gather", 1, 1),
        "one embedding off": edited("embed.weight", scaled(1.001, (7,))),
        "last norm dropped": edited("norm.weight", np.ones_like),
        "heads swapped in the second layer": gathered("Attention", 2, 1, [0, 1, 3, 2], index=1),
        "LayerNorm epsilon in the second layer":
            attribute("LayerNormalization", "epsilon", 1e-3, index=2),
    }),
    *_named("cross", {
        "scale dropped": attribute("Attention", "scale", 1.0),
        "keys and values swapped": swapped_inputs("Attention", 1, 2),
        "causal added": attribute("Attention", "is_causal", 1),
        "batch row leaked into the memory": row_leaked("Attention", 2),
    }),
    *_named("cross_causal", {
        "causal from the lower right": lower_right,
        "causal dropped": attribute("Attention", "is_causal", 0),
    }),
    *_named("by_hand", {
        "softcap after the mask": softcap_after_mask,
        "window one too long": constant_of("Greater", 1, plus(1)),
        "window one too short": constant_of("Greater", 1, plus(-1)),
        "scale dropped": constant_of("Mul", 1, np.ones_like),
        "softcap twice as wide": constant_of("Div", 1, scaled(2.0)),
        "softmax over the queries": attribute("Softmax", "axis", 2),
        "the causal bound one off": inserted("Less", 0, "Add", extra=1),
    }),
    *_named("windows", {
        "shift mask and bias dropped": without_input("Attention", 3),
        "bias transposed": constant_of("Expand", 0, lambda a: a.swapaxes(-1, -2)),
        "heads of the bias swapped": constant_of("Expand", 0, lambda a: a[:, :, [1, 0, 2, 3]]),
        "windows of the mask swapped": constant_of("Expand", 0, lambda a: a[:, [0, 2, 1, 3]]),
        "bias scaled like the scores": constant_of("Expand", 0, scaled(0.5)),
    }),
    *_named("linear", {
        "feature map without its one": constant_of("Add", 1, np.zeros_like, index=1),
        "weights not normalised": inserted("Div", 1, "Sqrt"),
        "bias dropped": edited("qkv.bias", np.zeros_like),
    }),
    *_named("detector", {
        "scores off by a thousandth beside boxes in pixels": edited("scores.bias", plus(1e-3)),
        "boxes in another size": constant_of("Mul", 1, scaled(1.001)),
        "scores swapped": edited("scores.bias", lambda a: a[::-1].copy()),
    }),
    *_named("classifier", {
        "smallest instead of largest": attribute("TopK", "largest", 0),
        "argmax of the negative": inserted("ArgMax", 0, "Neg"),
        "argmax with classes swapped": gathered("ArgMax", 0, 1, [1, 0, 2, 3, 4]),
        "logits off by a thousandth": edited("head.bias", scaled(1.001)),
    }),
    *_named("sampled", {
        "corners aligned": attribute("GridSample", "align_corners", 1),
        "borders instead of zeros": attribute("GridSample", "padding_mode", "border"),
        "nearest instead of linear": attribute("GridSample", "mode", "nearest"),
        "weights over the points dropped": attribute("Softmax", "axis", 1),
    }),
    *_named("decode", {
        "new before past in the keys": swapped_inputs("Concat", 0, 1, index=-2),
        "new before past in the values": swapped_inputs("Concat", 0, 1, index=-1),
        "rotary angles negated": inserted("Sin", 0, "Neg"),
        "rotary angles of the position before": inserted("Cos", 0, "Mul", extra=0.9),
        "mask dropped": without_input("Attention", 3),
        "scale dropped": attribute("Attention", "scale", 1.0),
        "key heads tiled": tiled_heads,
    }),
]  # fmt: skip
