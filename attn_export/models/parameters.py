"""Parameters that are known only when a module is built."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Forward = TypeVar("Forward", bound=Callable[..., Any])


def with_parameters(names: Iterable[str]) -> Callable[[Forward], Forward]:
    """Give a `forward(self, **tensors)` a parameter for each name.

    torch.export names the inputs after forward's parameters. It asks `inspect.signature`, which
    reads what is set here.
    """
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    kind = inspect.Parameter.KEYWORD_ONLY
    signature = inspect.Signature([own, *(inspect.Parameter(name, kind) for name in names)])

    def named(forward: Forward) -> Forward:
        vars(forward)["__signature__"] = signature
        return forward

    return named
