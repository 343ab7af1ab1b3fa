"""Shapes of the values of an .onnx graph at given sizes of its inputs; numpy and onnx suffice."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction

import onnx

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]


OPERATORS: Mapping[type, Callable[..., Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Pow: operator.pow, ast.USub: operator.neg,
}  # fmt: skip
FUNCTIONS: Mapping[str, Callable[..., Fraction | int]] = {
    "floor": math.floor, "ceiling": math.ceil, "Max": max, "Min": min, "Mod": operator.mod,
}  # fmt: skip


def infer(model: onnx.ModelProto, inputs: Shapes) -> dict[str, Shape]:
    """The shape of each value that is known: from the symbols of the graph, and from inference."""
    bound = onnx.ModelProto()
    bound.CopyFrom(model)
    symbols: dict[str, int] = {}
    for value in bound.graph.input:
        for dim, size in zip(
            value.type.tensor_type.shape.dim, inputs.get(value.name, ()), strict=False
        ):
            if dim.dim_param:
                symbols[dim.dim_param] = size
            dim.dim_value = size
    for value in [*bound.graph.value_info, *bound.graph.output]:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                known = _evaluate(dim.dim_param, symbols)
                dim.Clear() if known is None else setattr(dim, "dim_value", known)
    try:
        inferred = onnx.shape_inference.infer_shapes(bound, data_prop=True)
    except onnx.shape_inference.InferenceError:  # a domain without a version, say
        inferred = bound
    found = {tensor.name: tuple(tensor.dims) for tensor in inferred.graph.initializer}
    for value in [*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output]:
        dims = value.type.tensor_type.shape.dim
        has_rank = value.type.tensor_type.HasField("shape")
        if has_rank and all(dim.HasField("dim_value") for dim in dims):
            found.setdefault(value.name, tuple(dim.dim_value for dim in dims))
    return found


def _evaluate(text: str, symbols: Mapping[str, int]) -> int | None:
    """A symbolic size such as "batch*197" or "floor(width/14 - 1/14)"; None where it is not known.

    In fractions: 3/14 - 3/14 + 1 is 1, which roundings may miss.
    """

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int(number)):
                return Fraction(number)
            case ast.Name(id=name):
                return Fraction(symbols[name])
            case ast.BinOp(left=left, op=op, right=right):
                return OPERATORS[type(op)](value(left), value(right))
            case ast.UnaryOp(op=op, operand=operand):
                return OPERATORS[type(op)](value(operand))
            case ast.Call(func=ast.Name(id=name), args=args):
                return Fraction(FUNCTIONS[name](*map(value, args)))
        raise KeyError(type(node).__name__)

    if text in symbols:
        return symbols[text]
    try:
        found = value(ast.parse(text, mode="eval").body)
    except (ArithmeticError, KeyError, SyntaxError, TypeError):
        return None
    return int(found) if found.denominator == 1 and found >= 0 else None
