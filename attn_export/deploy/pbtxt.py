"""Protocol-buffer text format, as far as a Triton model configuration needs it.

Source: protobuf.dev/reference/protobuf/textformat-spec.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class Enum(str):
    """A name that is written without quotes."""

    __slots__ = ()


def dumps(message: Mapping[str, Any]) -> str:
    """A message whose fields are numbers, booleans, strings, enums, messages or lists of them.

    A mapping inside of a list is one message of a repeated field; a map field is a list of
    {"key", "value"}, which is what it is on the wire.
    """
    return "\n".join(_lines(message, "")) + "\n"


def entries(mapping: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A map field."""
    return [{"key": key, "value": value} for key, value in mapping.items()]


def _lines(message: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, value in message.items():
        if isinstance(value, Sequence) and not isinstance(value, str):
            if value and isinstance(value[0], Mapping):
                for item in value:
                    yield from _message(name, item, indent)
            else:
                yield f"{indent}{name}: [{', '.join(_scalar(item) for item in value)}]"
        elif isinstance(value, Mapping):
            yield from _message(name, value, indent)
        else:
            yield f"{indent}{name}: {_scalar(value)}"


def _message(name: str, value: Mapping[str, Any], indent: str) -> Iterator[str]:
    yield f"{indent}{name} {{"
    yield from _lines(value, f"{indent}  ")
    yield f"{indent}}}"


def _scalar(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    # The quotes and escapes of JSON are among those of the text format; bytes above 127 stay.
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)
