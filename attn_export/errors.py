"""Every error that attn-export raises on purpose, and the exit code each one owns.

AttnExportError
├── CheckFailed          1  a check says no: parity, --require
├── UsageError           2  a wrong name, option or argument; an output that exists
│   └── InputError       2  arrays that the model does not take; the model never saw them
├── RuntimeUnavailable   3  a runtime that was asked for cannot work here
├── ExportError          4  export or lowering failed
└── FileError            5  a file or bundle is bad, or could not be written
"""

from __future__ import annotations


class AttnExportError(Exception):
    """One sentence: what was observed, and one way out.

    Args:
        observed: what was seen, as a clause without a full stop.
        way_out: what the reader can do about it, as a clause without a full stop.
    """

    exit_code = 4

    def __init__(self, observed: str, way_out: str) -> None:
        super().__init__(f"{observed}; {way_out}.")
        self.observed = observed
        self.way_out = way_out

    def __reduce__(self) -> tuple[type[AttnExportError], tuple[str, str]]:
        return type(self), (self.observed, self.way_out)


class CheckFailed(AttnExportError):
    exit_code = 1


class UsageError(AttnExportError):
    exit_code = 2


class InputError(UsageError):
    """Separate, so that a server can tell a caller's mistake from one of its own."""


class RuntimeUnavailable(AttnExportError):
    exit_code = 3


class ExportError(AttnExportError):
    exit_code = 4


class FileError(AttnExportError):
    exit_code = 5


def one_line(error: BaseException, limit: int = 300) -> str:
    """The first meaningful line of another library's message, for use inside a sentence."""
    lines = (line.strip() for line in str(error).splitlines())
    text = next((line for line in lines if line), type(error).__name__)
    return (text if len(text) <= limit else f"{text[: limit - 1]}…").rstrip(".")
