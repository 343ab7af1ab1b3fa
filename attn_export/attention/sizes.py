"""Sizes of a graph: integers, or expressions of its symbolic sizes, which are positive integers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import onnx_ir as ir
import sympy

Expression = Any  # sympy.Expr: sympy ships no types
Size = int | Expression


@cache
def size_of(text: str) -> Size:
    """A symbolic size as an expression; symbols are positive integers."""
    # Every name is a symbol, also S, N and E, which mean something to sympy; Max( is a function.
    words = {
        word: sympy.Symbol(word, integer=True, positive=True)
        for word in re.findall(r"[A-Za-z_]\w*\b(?!\s*\()", text)
    }
    return plain(sympy.sympify(text, locals=words))


def sizes(value: ir.Value) -> tuple[Size, ...]:
    """The sizes of a value; an unknown one is a symbol of its own, equal to itself alone.

    Raises:
        ValueError: the rank is unknown.
    """
    if value.shape is None:
        raise ValueError(f"the rank of '{value.name}' is unknown")
    found: list[Size] = []
    for axis, size in enumerate(value.shape):
        if isinstance(size, int):
            found.append(size)
        elif size.value is None:
            found.append(sympy.Symbol(f"{value.name}_{axis}", integer=True, positive=True))
        else:
            found.append(size_of(str(size.value)))
    return tuple(found)


def shape_of(sizes: Iterable[Size]) -> ir.Shape:
    """Sizes as the shape of a value; an expression is written out."""
    return ir.Shape([size if isinstance(size, int) else str(size) for size in sizes])


def evaluate(size: int | str | ir.SymbolicDim, binding: Mapping[str, int]) -> int:
    """The number that a size is when its symbols are `binding`.

    Raises:
        ValueError: a symbol has no value there, or the size itself is unknown.
    """
    if isinstance(size, int):
        return size
    if isinstance(size, ir.SymbolicDim) and size.value is None:
        raise ValueError("a size is unknown")
    expression = size_of(size if isinstance(size, str) else str(size.value))
    if isinstance(expression, int):
        return expression
    unknown = {symbol.name for symbol in expression.free_symbols} - set(binding)
    if unknown:
        raise ValueError(f"no value is known for the size '{min(unknown)}'")
    return int(expression.subs({s: binding[s.name] for s in expression.free_symbols}))


def plain(size: Size) -> Size:
    if isinstance(size, int):
        return size
    expanded = sympy.expand(size)
    return int(expanded) if expanded.is_Integer else expanded


@cache
def divide(size: Size, by: Size) -> Size | None:
    """size / by where it is whole for every value of the symbols, else None."""
    if isinstance(size, int) and isinstance(by, int):
        return size // by if size % by == 0 else None
    quotient = plain(sympy.cancel(sympy.sympify(size) / by))
    if isinstance(quotient, int):
        return quotient
    return quotient if quotient.is_integer and sympy.denom(sympy.together(quotient)) == 1 else None
