"""Dataclasses out of what a manifest declares; ValueError has a clause on what is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def one_of(name: str, value: Any, known: Sequence[Any]) -> None:
    if not isinstance(value, (str, bool)) or value not in known:
        raise ValueError(f"{name} is {value!r}, not one of {', '.join(map(str, known))}")


def text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} is {value!r}, not a name")


def number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> None:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not real or not math.isfinite(value) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}, not a number from {low} to {high}")


def whole(name: str, value: Any, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{name} is {value!r}, not a whole number of {low} or more")


def floats(name: str, value: Any) -> tuple[float, ...]:
    values = value if isinstance(value, (list, tuple)) else (value,)
    if not values:
        raise ValueError(f"{name} is empty")
    for each in values:
        number(name, each)
    return tuple(float(each) for each in values)


def pixels(name: str, value: Any) -> tuple[float, ...]:
    values = floats(name, value)
    for each in values:
        number(name, each, 0, 255)
    return values


def lengths(name: str, value: Any) -> tuple[int, int]:
    """Height and width; one number stands for both."""
    values = value if isinstance(value, (list, tuple)) else (value, value)
    if len(values) != 2:
        raise ValueError(f"{name} has {len(values)} numbers, not height and width")
    for each in values:
        whole(name, each, 1)
    height, width = values
    return int(height), int(width)


def mapping(given: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise ValueError(f"{where} is {given!r}, which is no object")
    return given


def build(kind: type[T], given: Any, where: str) -> T:
    """A dataclass from what JSON holds; a field that it does not have is refused."""
    known = {each.name: each for each in fields(kind)}
    for key in mapping(given, where):
        if key not in known:
            raise ValueError(f"{where} has '{key}', which is not known; fields: {', '.join(known)}")
    for name, each in known.items():
        required = each.default is MISSING and each.default_factory is MISSING
        if required and name not in given:
            raise ValueError(f"{where} lacks '{name}'")
    try:
        return kind(**given)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
