"""What torch.export refuses, in one sentence with the line of the user's own code."""

from __future__ import annotations

import io
import linecache
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import torch

from attn_export.errors import ExportError, one_line

_TORCH = Path(torch.__file__).parent
_TELLING = ("Not all values", "was inferred to be a constant", "marked", "Could not guard")
_DATA_DEPENDENT = "Could not guard on data-dependent"


@contextmanager
def unprinted_graph() -> Iterator[None]:
    """Keep off stderr the graph that torch.export prints as it raises, and nothing else."""
    said, graph = io.StringIO(), ""
    try:
        with redirect_stderr(said):
            yield
    except Exception as error:
        graph = f"{getattr(error, 'partial_fx_graph', '')}\n"
        raise
    finally:
        sys.stderr.write(said.getvalue().replace(graph, "") if graph else said.getvalue())


def refusal(error: Exception) -> ExportError:
    """The refusal of torch.export as an ExportError; `error` is what it raised."""
    reason, where = _reason(error), _where(error)
    excluded = re.search(r"!= (\d+)$", reason)  # a size at which forward takes another path
    if excluded:
        way_out = f"declare that axis up to {int(excluded[1]) - 1}"
    elif _DATA_DEPENDENT in reason:
        reason = "the values of a tensor decide which path forward takes"
        way_out = "write that choice with torch.where, which a graph can hold"
    else:
        way_out = "make that part of forward exportable, or declare fewer dynamic axes"
    return ExportError(f"torch.export refuses the model{where} ({reason})", way_out)


def _reason(error: Exception) -> str:
    """The line of a torch.export message that says what is wrong, often not the first."""
    lines = [line.strip(" -\t") for line in str(error).splitlines() if line.strip()]
    for line in lines:
        if any(phrase in line for phrase in _TELLING):
            return one_line(Exception(line))
    return f"{type(error).__name__}: {one_line(error)}"


def _where(error: Exception) -> str:
    """The innermost line outside of PyTorch that was reached after PyTorch was entered."""
    frames = traceback.extract_tb(error.__traceback__)
    entered = False
    found = None
    for frame in frames:
        inside = _TORCH in Path(frame.filename).parents
        if entered and not inside and Path(frame.filename).is_file():
            found = frame
        entered = entered or inside
    if found is None:
        return ""
    code = linecache.getline(found.filename, found.lineno or 0).strip()
    return f" at {Path(found.filename).name}:{found.lineno}, `{code}`"
