"""Sizes of every value of a graph, as expressions of the symbolic sizes of its inputs.

1. Symbols of the file become plain identifiers; an unnamed size of an input gets a name. What the
   file called them is put back when the graph is written.
2. ONNX's own inference fills ranks and fixed sizes, in subgraphs too.
3. ONNX Runtime's symbolic inference follows sizes through the arithmetic of Shape, Gather, Concat
   and Reshape in the main graph. Where it stops, what it knew until then is kept.

Weights are left out of both; a value that neither knows keeps what the file said of it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import sympy
from onnx_ir.passes.common import ShapeInferencePass
from onnxscript.optimizer import fold_constants

from attn_export.errors import one_line
from attn_export.extras import require
from attn_export.onnx_files.shape_rules import add_rules
from attn_export.runtimes.ort import import_onnxruntime

SMALL = 1024  # bytes; constants up to this size may hold axes and shapes
TELLING = ("Attention", "Exp", "GroupQueryAttention", "MultiHeadAttention", "Softmax")
WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass
class Symbols:
    """The names of symbolic sizes: as the file has them, and as the graph has them meanwhile.

    Attributes:
        given: our name -> the file's; None where the file had none.
        edges: the shapes of inputs and outputs as they were.
    """

    given: dict[str, str | None] = field(default_factory=dict)
    edges: list[tuple[ir.Value, ir.Shape | None]] = field(default_factory=list)

    def restore(self, model: ir.Model) -> None:
        """Put the file's names back."""
        for graph in model.graphs():
            for value in _values(graph):
                if value.shape is not None:
                    value.shape = ir.Shape([self._back(size) for size in value.shape])
        for value, shape in self.edges:
            value.shape = shape

    def _back(self, size: int | ir.SymbolicDim) -> int | str | None:
        if isinstance(size, int) or size.value is None:
            return size if isinstance(size, int) else None
        text = str(size.value)
        if text in self.given:
            return self.given[text]
        words = set(WORD.findall(text)) - {"floor", "Max", "Min", "Mod", "ceiling"}
        known = all(self.given.get(word) == word for word in words)
        return text if known else None


def name_symbols(model: ir.Model) -> Symbols:
    """Give each symbolic size a name that is an identifier, and each unnamed size of an input one.

    A size such as "past + 1" stays an expression where its words are sizes of other inputs.
    """
    graph, symbols = model.graph, Symbols()
    for value in dict.fromkeys([*graph.inputs, *graph.outputs]):
        symbols.edges.append((value, value.shape))
    inputs = [value for value in graph.inputs if value.shape is not None]
    plain = {text for v in inputs for size in v.shape or () if (text := _text(size))}
    new: dict[str, str] = {}
    for text in sorted(plain):
        if WORD.fullmatch(text) or not set(WORD.findall(text)) <= plain:
            new[text] = _fresh(text, symbols)
    for index, value in enumerate(inputs):
        sizes: list[int | str] = []
        for axis, size in enumerate(value.shape or ()):
            text = _text(size)
            if isinstance(size, int) and size >= 0:
                sizes.append(size)
            elif text is None:
                name = _fresh(f"{value.name or f'input{index}'}_{axis}", symbols)
                symbols.given[name] = None
                sizes.append(name)
            else:
                sizes.append(_renamed(text, new))
        value.shape = ir.Shape(sizes)
    for inner in model.graphs():
        for value in _values(inner):
            if value.shape is not None and value not in inputs:
                value.shape = ir.Shape([_elsewhere(size, new) for size in value.shape])
    return symbols


def _text(size: int | ir.SymbolicDim) -> str | None:
    """The name of a size, where it has one that means something."""
    if isinstance(size, int) or size.value is None or not WORD.search(str(size.value)):
        return None
    return str(size.value)


def _fresh(wanted: str, symbols: Symbols) -> str:
    """An identifier that sympy does not take for a function or a constant of its own."""
    name = re.sub(r"\W", "_", wanted)
    if not WORD.fullmatch(name) or hasattr(sympy, name) or name in _KEYWORDS:
        name = f"size_{name}"
    while name in symbols.given:
        name += "_"
    symbols.given[name] = wanted
    return name


_KEYWORDS = frozenset({"and", "as", "in", "is", "lambda", "not", "or", "None", "True", "False"})


def _renamed(text: str, new: dict[str, str]) -> str:
    return new.get(text) or WORD.sub(lambda word: new.get(word[0], word[0]), text)


def _elsewhere(size: int | ir.SymbolicDim, new: dict[str, str]) -> int | str | None:
    """A size that is no input's: a number, one of the inputs' symbols, or unknown."""
    if isinstance(size, int):
        return size if size >= 0 else None
    text = _text(size)
    return new.get(text) if text else None


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    for node in graph:
        yield from node.outputs


def infer(model: ir.Model) -> str:
    """Fill in the sizes, in place; a note where the symbolic part stopped, else empty."""
    require("graph")
    with _silent("onnx_ir", "onnxscript", "attn_export._symbolic_shape_infer"):
        ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model)
        return _symbolic(model)


def _symbolic(model: ir.Model) -> str:
    """Overlay the symbolic sizes; folding constants first helps most graphs and breaks some."""
    if not any(node.op_type in TELLING for node in model.graph):
        return ""  # no attention, and large convolutional networks take minutes
    known, problem = _known(_without_weights(model, fold=True))
    if problem:
        other, still = _known(_without_weights(model, fold=False))
        # Never both: each names the sizes that it does not know by numbers of its own.
        if not still or len(other) > len(known):
            known, problem = other, still
    for value in _values(model.graph):
        if value.is_graph_input() or value.name not in known:
            continue
        found = known[value.name].type.tensor_type
        if found.HasField("shape"):
            value.shape = _merged(value.shape, found.shape)
        if value.type is None and found.elem_type:
            value.type = ir.TensorType(ir.DataType(found.elem_type))
    return f"symbolic sizes are known only in part ({problem})" if problem else ""


def _known(model: onnx.ModelProto) -> tuple[dict[str, onnx.ValueInfoProto], str]:
    """What ONNX Runtime's symbolic inference finds by name, and why it stopped, if it did."""
    # Its public entry writes a file into the working folder where it stops half-way.
    inference = _symbolic_shape_infer().SymbolicShapeInference(2**31 - 1, True, False, 0)
    add_rules(inference)
    problem = ""
    try:
        inference._preprocess(model)
        while inference.run_:
            inference._infer_impl()
    except Exception as error:  # assertions and whatever an operator's rule raises
        problem = one_line(error)
    found = getattr(inference, "known_vi_", {})
    return {name: info for name, info in found.items() if info is not None}, problem


@cache
def _symbolic_shape_infer() -> Any:
    """The module alone: its package imports torch where that is installed."""
    import_onnxruntime()
    found = find_spec("onnxruntime")
    assert found is not None
    assert found.submodule_search_locations is not None
    path = Path(found.submodule_search_locations[0], "tools", "symbolic_shape_infer.py")
    spec = spec_from_file_location("attn_export._symbolic_shape_infer", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _merged(before: ir.Shape | None, found: onnx.TensorShapeProto) -> ir.Shape | None:
    sizes: list[int | str | None] = []
    for axis, size in enumerate(found.dim):
        known = before[axis] if before is not None and len(before) == len(found.dim) else None
        if isinstance(known, int) and known > 0:  # ONNX says 0 for the sum of two unknown sizes
            sizes.append(known)
        elif size.HasField("dim_value"):
            sizes.append(size.dim_value)
        else:
            sizes.append(size.dim_param or None)
    return ir.Shape(sizes)


def _without_weights(model: ir.Model, fold: bool) -> onnx.ModelProto:
    """The model with its large constants as inputs; the tensors are shared, not copied."""
    light = model.clone()
    for name, value in list(light.graph.initializers.items()):
        tensor = value.const_value
        if tensor is not None and tensor.nbytes > SMALL:
            del light.graph.initializers[name]
            value.const_value = None
            value.shape, value.type = ir.Shape(tensor.shape.numpy()), ir.TensorType(tensor.dtype)
            if value not in light.graph.inputs:
                light.graph.inputs.append(value)
    if fold:
        fold_constants(light, onnx_shape_inference=False)  # arithmetic of a Slice's bounds
    return ir.to_proto(light)


@contextmanager
def _silent(*names: str) -> Iterator[None]:
    """No warnings from loggers that would write over our own lines."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
