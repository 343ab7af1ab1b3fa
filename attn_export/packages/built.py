"""What the packages' files share: the package itself, an image, a sentence about weights."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from attn_export.errors import (
    AttnExportError,
    ExportError,
    RuntimeUnavailable,
    UsageError,
    one_line,
)
from attn_export.models.spec import ExportSpec

Built = tuple[ExportSpec, list[str]]  # with notes for the owner of the model


def needs(package: str) -> Any:
    """The imported package.

    Raises:
        RuntimeUnavailable: it is not installed, or does not work here.
    """
    if find_spec(package) is None:
        raise RuntimeUnavailable(
            f"this needs {package}, which is not installed", f"run `pip install {package}`"
        )
    try:
        return importlib.import_module(package)
    except Exception as error:
        raise RuntimeUnavailable(
            f"importing {package} raised {type(error).__name__}: {one_line(error)}",
            f"install a {package} that fits torch {torch.__version__}",
        ) from error


def unknown(package: str, name: str, names: Iterable[str]) -> UsageError:
    """What to raise for a name that the package does not have."""
    close = difflib.get_close_matches(name, list(names), n=3)
    way_out = f"did you mean {' or '.join(close)}" if close else f"see what {package} lists"
    return UsageError(f"{package} has no model '{name}'", way_out)


def refused(origin: str, error: Exception) -> AttnExportError:
    """What to raise where a package does not build a model that it lists."""
    return ExportError(
        f"{origin} raised {type(error).__name__}: {one_line(error)}",
        "give a factory of your own that builds it",
    )


def images(*size: int) -> Tensor:
    """Two standard normal images (or clips) of the given axes, e.g. (3, 224, 224)."""
    return torch.randn(2, *size, generator=torch.Generator().manual_seed(0))


def random_weights(name: str, fetch: str) -> str:
    return f"the weights are random: this disk has none for {name}; {fetch} brings trained ones"
