"""Find causal linear attention (Katharopoulos et al., 2020) by what it computes.

    y[i] = scale * sum over j <= i of (q[i] . k[j]) v[j]

in one of the forms in which people write it: products under a triangle (tril, a 0/1 mask, a fill
with 0), a running sum of k v^T that the queries read, or chunks that do the one inside and the
other between them. No softmax stands in between: with one it is attention, and not found here.
What the features of q and k are, and what the result is divided by, stays in the graph as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from attn_export.attention.contraction import Factor, Labeller
from attn_export.attention.data import depends_on_input
from attn_export.attention.layout import constant

TRIANGLE, CUMSUM, CHUNKS, SCAN = "triangle", "cumsum", "chunks", "scan"


@dataclass(frozen=True)
class Recurrence:
    """S[t] = S[t-1] + k[t] v[t]^T, or one of its gated and delta forms, and y[t] = scale q[t] S[t].

    Attributes:
        name: of the node that ends it.
        form: how it is written; TRIANGLE, CUMSUM, CHUNKS or SCAN.
        rule: `update_rule` of com.microsoft LinearAttention.
        tokens: labels of the axes along which time runs, outer to inner.
        value: None where the weights are summed up, which is attention to values of 1.
        key_axis: label of H. Whatever else q, k and y share are batch and heads.
        decay: how much of the state is kept, in log space where `decay_is_log`.
        state: the state before and the value that is the state after.
    """

    name: str
    form: str
    rule: str
    query: Factor
    key: Factor
    value: Factor | None
    output: Factor
    tokens: tuple[int, ...]
    key_axis: int
    scale: float
    decay: Factor | None = None
    decay_is_log: bool = True
    beta: Factor | None = None
    state: tuple[ir.Value, ir.Value] | None = None


def recurrences(model: ir.Model) -> list[Recurrence]:
    """The causal linear attention of the main graph that is no Scan, in its order."""
    found: list[Recurrence] = []
    parts: set[int] = set()
    for node in reversed(model.graph):
        if node.op_type not in _ENDS or id(node) in parts or not node.outputs:
            continue
        recurrence = _chunks(node) if node.op_type == "Add" else _find(node.outputs[0])
        if recurrence is not None:
            parts |= {id(v.producer()) for v in node.inputs if v is not None and v.producer()}
            found.append(recurrence)
    return found[::-1]


_ENDS = ("Add", "Einsum", "MatMul", "ReduceSum")


def _find(end: ir.Value) -> Recurrence | None:
    if end.shape is None:
        return None
    labeller = Labeller()
    output = labeller.name(end)
    scale, factors = labeller.factors(output)
    for causal, other in (factors, factors[::-1]) if len(factors) == 2 else ():
        for read in (_triangle, _running_sum):
            found = read(labeller, output, scale, causal, other)
            if found is not None:
                return found
    return _sum_of_weights(labeller, output)


def _triangle(
    labeller: Labeller, output: Factor, scale: float, scores: Factor, value: Factor
) -> Recurrence | None:
    """sum over j of triangle(q[i] . k[j]) v[j]."""
    outer, scores = labeller.peel(scores)
    products = _under_triangle(scores)
    if products is None:
        return None
    inner, factors = labeller.factors(products)
    if len(factors) != 2:
        return None
    earlier = [n for n in scores.labels if n is not None and n not in output.labels]
    own = [n for n in scores.labels if n in output.labels and n not in value.labels]
    if len(earlier) != 1 or len(own) != 1 or own[0] is None:
        return None
    value = _rename(value, earlier[0], own[0])
    return _inside(output, scale * outer * inner, factors, value, earlier[0], own[0])


def _sum_of_weights(labeller: Labeller, output: Factor) -> Recurrence | None:
    """sum over j of triangle(q[i] . k[j])."""
    scores = labeller.before_sum(output)
    products = _under_triangle(scores) if scores is not None else None
    if scores is None or products is None or len(scores.labels) < 2:
        return None
    scale, factors = labeller.factors(products)
    own, earlier = scores.labels[-2:]
    if len(factors) != 2 or own is None or earlier is None or earlier in output.labels:
        return None
    return _inside(output, scale, factors, None, earlier, own)


def _inside(
    output: Factor,
    scale: float,
    factors: list[Factor],
    value: Factor | None,
    earlier: int,
    own: int,
) -> Recurrence | None:
    """One time for all: what k and v call j is what q and y call i."""
    query, key = factors if own in factors[0].labels else factors[::-1]
    key = _rename(key, earlier, own)
    return _recurrence(TRIANGLE, output, scale, query, key, value, own)


def _under_triangle(scores: Factor) -> Factor | None:
    """What a mask lets through, the rest being 0; whether it is a triangle, the proof decides."""
    node = scores.value.producer()
    if node is None or node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type == "Trilu":
        inside = [node.inputs[0]]
    elif node.op_type == "Where":
        inside = [v for v in node.inputs[1:] if not _is_zero(v)]
        if node.inputs[0] is None or depends_on_input(node.inputs[0]):
            return None
    elif node.op_type == "Mul":
        inside = [v for v in node.inputs if v is not None and depends_on_input(v)]
    else:
        return None
    same = [v for v in inside if v is not None and v.shape == scores.value.shape]
    return Factor(same[0], scores.labels) if len(inside) == len(same) == 1 else None


def _is_zero(value: ir.Value | None) -> bool:
    array = constant(value)
    return array is not None and not array.any()


def _running_sum(
    labeller: Labeller, output: Factor, scale: float, sums: Factor, query: Factor
) -> Recurrence | None:
    """q[t] times the running sum of k[t] v[t]^T."""
    outer, sums = labeller.peel(sums)
    node = sums.value.producer()
    if node is None or node.op_type != "CumSum" or node.inputs[0] is None:
        return None
    axis = constant(node.inputs[1])
    if axis is None or any(node.attributes.get_int(flag, 0) for flag in ("exclusive", "reverse")):
        return None
    time = sums.labels[int(axis.reshape(-1)[0])]
    if time is None:
        return None
    summed = Factor(node.inputs[0], sums.labels)
    if set(sums.labels) <= set(query.labels):
        key = labeller.strip(summed)
        return _recurrence(CUMSUM, output, scale * outer, query, key, None, time)
    inner, factors = labeller.factors(summed)
    if len(factors) != 2:
        return None
    first_is_value = set(factors[0].labels) - set(query.labels) - {None}
    value, key = factors if first_is_value else factors[::-1]
    return _recurrence(CUMSUM, output, scale * outer * inner, query, key, value, time)


def _chunks(node: ir.Node) -> Recurrence | None:
    """A triangle inside each chunk, and what the queries read of all chunks before."""
    for own, before in (node.inputs, list(node.inputs)[::-1]):
        inside = _find(own) if own is not None else None
        if inside is None or before is None or inside.form != TRIANGLE:
            continue
        labeller = Labeller()
        _, factors = labeller.factors(labeller.name(before))
        if not any(factor.value is inside.query.value for factor in factors):
            continue
        labels = inside.output.labels
        chunk = labels[labels.index(inside.tokens[0]) - 1]
        if chunk is None:
            continue
        output = Factor(node.outputs[0], inside.output.labels)
        name, tokens = str(node.name), (chunk, *inside.tokens)
        return replace(inside, name=name, form=CHUNKS, output=output, tokens=tokens)
    return None


def _rename(factor: Factor, before: int, after: int) -> Factor:
    return Factor(factor.value, tuple(after if n == before else n for n in factor.labels))


def _recurrence(
    form: str,
    output: Factor,
    scale: float,
    query: Factor,
    key: Factor,
    value: Factor | None,
    time: int,
) -> Recurrence | None:
    """Where the axes are those of linear attention: all share batch, heads and time."""
    given = [query, key] if value is None else [query, key, value]
    names = [{n for n in factor.labels if n is not None} for factor in (*given, output)]
    shared = set.intersection(*names)
    q, k, *v, y = (own - shared for own in names)
    features = v[0] if v else set()
    if time not in shared or len(q) != 1 or q != k or y != features or len(features) != len(v):
        return None
    if features == q or not all(depends_on_input(factor.value) for factor in given):
        return None
    end = output.value.producer()
    name = str(end.name) if end is not None else ""
    (key_axis,) = q
    return Recurrence(name, form, "linear", query, key, value, output, (time,), key_axis, scale)
