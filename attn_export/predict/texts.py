"""A text -> token ids and masks, by the bundle's own tokenizer file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attn_export.errors import FileError, InputError, one_line
from attn_export.extras import require
from attn_export.predict.steps import TextSteps


@dataclass(frozen=True)
class Encoded:
    """One text: its token ids and types, and whether it was cut to the longest length."""

    ids: list[int]
    types: list[int]
    cut: bool


class TextReader:
    """Encodes texts and pads them into batches, as TextSteps say.

    Raises:
        RuntimeUnavailable: the tokenizers package is not installed.
        FileError: the tokenizer's file does not parse.
    """

    def __init__(self, folder: Path, steps: TextSteps) -> None:
        require("predict")
        from tokenizers import Tokenizer

        self.steps = steps
        try:
            self.tokenizer: Any = Tokenizer.from_file(str(folder / steps.file))
        except Exception as error:  # the package raises plain Exception
            raise FileError(
                f"{folder / steps.file} is no tokenizer ({one_line(error)})",
                "export the bundle again",
            ) from error
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        if steps.truncate:
            self.tokenizer.enable_truncation(steps.max_length)

    def encode(self, text: str, pair: str | None = None) -> Encoded:
        """One text, or two of which the second one has type 1.

        Raises:
            InputError: it has no tokens, unknown words, or too many tokens.
        """
        try:
            found = self.tokenizer.encode(text, pair, add_special_tokens=self.steps.special_tokens)
        except Exception as error:
            raise InputError(
                f"the text does not encode ({one_line(error)})", "use words that it knows"
            ) from error
        if not found.ids:
            raise InputError("the text has no tokens", "leave it out")
        if len(found.ids) > self.steps.max_length:
            raise InputError(
                f"the text has {len(found.ids)} tokens, the model takes {self.steps.max_length}",
                "split it",
            )
        return Encoded(list(found.ids), list(found.type_ids), bool(found.overflowing))

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def batch(self, texts: list[Encoded], least: int = 1) -> dict[str, NDArray[np.int64]]:
        """Inputs (B, S), padded to the longest of these texts (at least `least`) or of all."""
        steps = self.steps
        longest = max(least, *(len(text.ids) for text in texts))
        size = steps.max_length if steps.padding == "max_length" else longest
        whole = {
            "ids": [_padded(text.ids, size, steps.pad_id, steps.side) for text in texts],
            "mask": [_padded([1] * len(text.ids), size, 0, steps.side) for text in texts],
            "types": [_padded(text.types, size, 0, steps.side) for text in texts],
        }
        return {name: np.array(whole[what], np.int64) for name, what in steps.inputs.items()}


def _padded(values: list[int], size: int, filler: int, side: str) -> list[int]:
    padding = [filler] * (size - len(values))
    return [*values, *padding] if side == "right" else [*padding, *values]
