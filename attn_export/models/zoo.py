"""The models that have a name on the command line. Listing them imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attn_export.models.spec import ExportSpec


@dataclass(frozen=True)
class ZooEntry:
    """One row of `attn-export models`.

    Attributes:
        factory: "module:function" below `attn_export.models`; takes no arguments and returns an
            ExportSpec, or one for each component (encoder, decoder step) by its name.
        parameters: weights that are learned, counted over all components.
        tokens: sequence lengths that attention runs over, in words.
        kinds: kinds of attention inside, in the order in which they occur.
        trained: whether the package ships trained weights (else seeded random ones).
    """

    factory: str
    summary: str
    parameters: int
    tokens: str
    kinds: tuple[str, ...]
    trained: bool = False

    def build(self) -> ExportSpec | dict[str, ExportSpec]:
        module, function = self.factory.split(":")
        factory: Callable[[], ExportSpec | dict[str, ExportSpec]] = getattr(
            importlib.import_module(f"attn_export.models.{module}"), function
        )
        return factory()


ZOO: dict[str, ZooEntry] = {
    "vit-digits": ZooEntry(
        factory="vit_digits:vit_digits",
        summary="Vision Transformer trained on the UCI handwritten digits",
        parameters=302_154,
        tokens="17",
        kinds=("self",),
        trained=True,
    ),
}
