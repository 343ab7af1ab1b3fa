"""A sample of the user's -> the arrays of one row, as the manifest declares it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attn_export.errors import FileError, InputError
from attn_export.extras import require
from attn_export.parity.tolerance import Array
from attn_export.predict import arrays, lines, parquet
from attn_export.predict.declared import Declared
from attn_export.predict.sources import Source
from attn_export.predict.steps import ImageSteps
from attn_export.predict.texts import Encoded, TextReader
from attn_export.runtimes.base import TensorSpec

if TYPE_CHECKING:
    from PIL import Image

    from attn_export.predict.images import Placement

IDENTIFIER, TEXT, PAIR, IMAGE = "id", "text", "pair", "image"


@dataclass
class Sample:
    """One row of a batch.

    Attributes:
        name: what results call it.
        arrays: by input, without the axis of the batch; those of a text come with its batch.
        image: as it was read, upright.
        shown: height and width that the model sees, where it sees an image.
        told: what its answer repeats (`id`, `text`, `truncated`).
        position: among those that were asked for together.
    """

    name: str
    arrays: dict[str, Array] = field(default_factory=dict)
    text: Encoded | None = None
    image: Image.Image | None = None
    placement: Placement | None = None
    shown: tuple[int, int] = (1, 1)
    told: dict[str, Any] = field(default_factory=dict)
    position: int = 0


class Reader:
    """Reads samples for one bundle."""

    def __init__(
        self, declared: Declared, specs: Sequence[TensorSpec], texts: TextReader | None
    ) -> None:
        self.declared, self.texts = declared, texts
        self.specs = {spec.name: spec for spec in specs}

    def read(self, source: Source, row: int) -> Sample:
        """One sample.

        Raises:
            FileError, InputError: it cannot be read, or is not what the bundle takes.
        """
        if source.error is not None:
            raise source.error
        sample = Sample(source.label(row))
        base, values = source.path.parent, self._values(source, row)
        if IDENTIFIER in values and IDENTIFIER not in self.specs:
            sample.told[IDENTIFIER] = values.pop(IDENTIFIER)
        texts = {key: values.pop(key) for key in self._text_keys(values)}
        if texts:
            self._take_text(sample, **texts)
        for key, value in values.items():
            self._take(sample, key, value, base)
        self._note_sizes(sample)
        return sample

    def _values(self, source: Source, row: int) -> dict[str, Any]:
        kind, path = source.kind, source.path
        if kind == "given":
            return dict(source.value)
        if kind == "image":
            return {self._image_input(path): path}
        if kind == "text":
            return lines.text(path, row)
        if kind == "jsonl":
            return lines.json_sample(path, row)
        if kind == "parquet":
            known = {IDENTIFIER, TEXT, PAIR, IMAGE, *self.specs}
            found = parquet.sample(path, row)
            return {key: value for key, value in found.items() if key in known}
        found = arrays.sample(path, kind, tuple(self.specs), None if source.single else row)
        return dict(found)

    def _image_input(self, where: object) -> str:
        if len(self.declared.images) == 1:
            return next(iter(self.declared.images))
        if not self.declared.images:
            raise FileError(
                f"{where} is an image, and the bundle declares no `preprocess` for one",
                "give arrays (.npy), or export it with ExportSpec.preprocess",
            )
        raise FileError(
            f"{where} is an image, and the bundle takes {len(self.declared.images)} a sample",
            "name them in JSON lines",
        )

    def _take(self, sample: Sample, key: str, value: Any, base: Path) -> None:
        if key == IMAGE and key not in self.specs and self.declared.images:
            self._take(sample, self._image_input(sample.name), value, base)
        elif key not in self.specs:
            known = [*self.specs, *([TEXT] if self.texts else [])]
            raise InputError(f"the model has no input '{key}'", f"it takes {', '.join(known)}")
        elif key in self.declared.images and _is_picture(value):
            self._take_image(sample, self.declared.images[key], key, value, base)
        else:
            sample.arrays[key] = _array(self.specs[key], value)

    def _text_keys(self, values: Mapping[str, Any]) -> list[str]:
        return [key for key in (TEXT, PAIR) if key in values and key not in self.specs]

    def _take_text(self, sample: Sample, text: Any = None, pair: Any = None) -> None:
        if self.texts is None:
            raise InputError("the bundle has no tokenizer for a text", "give token ids (.npz)")
        if text is None:
            raise InputError("there is a 'pair' without a 'text'", "write both")
        for value in (text, pair):
            if value is not None and not isinstance(value, str):
                raise InputError(f"a text is a {type(value).__name__}", "write a string")
        sample.text = self.texts.encode(text, pair)
        sample.told[TEXT] = text
        if sample.text.cut:
            sample.told["truncated"] = True

    def _take_image(
        self, sample: Sample, steps: ImageSteps, name: str, value: Any, base: Path
    ) -> None:
        require("predict")
        from attn_export.predict import images

        if isinstance(value, Mapping):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, np.ndarray):
            image = images.from_pixels(value, sample.name)
        elif isinstance(value, (str, Path)):
            path = value if isinstance(value, Path) else base / value
            image = images.decode(path, str(path))
        else:
            image = images.decode(value, sample.name)
        array, placement = images.prepare(image, steps)
        sample.arrays[name] = array.astype(self.specs[name].dtype, copy=False)
        sample.image, sample.placement = image, placement
        if steps.mask:
            mask = images.shown_mask(placement)
            sample.arrays[steps.mask] = mask.astype(self.specs[steps.mask].dtype)

    def _note_sizes(self, sample: Sample) -> None:
        for name, steps in self.declared.images.items():
            if name in sample.arrays:
                shape = sample.arrays[name].shape
                if len(shape) == 3:
                    height, width = shape[1:] if steps.layout == "chw" else shape[:2]
                    sample.shown = (int(height), int(width))


def _is_picture(value: Any) -> bool:
    """A path, an encoded image, or pixels; other arrays are what the model takes."""
    if isinstance(value, np.ndarray):
        return bool(value.dtype == np.uint8)
    return isinstance(value, (str, Path, bytes)) or (
        isinstance(value, Mapping) and bool({"bytes", "path"} & value.keys())
    )


def _array(spec: TensorSpec, value: Any) -> Array:
    """An array as it is; numbers of JSON and Parquet in the input's dtype.

    Raises:
        InputError: no numbers, ragged, or numbers that the dtype does not hold.
    """
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    wanted = np.dtype(spec.dtype)
    try:
        given = np.asarray(value)
    except ValueError as error:
        raise InputError(f"'{spec.name}' is ragged", "make its rows equally long") from error
    fits = given.dtype.kind in {"f": "fiu", "i": "iu", "u": "iu", "b": "b"}.get(wanted.kind, "")
    if fits and given.dtype.kind in "iu" and wanted.kind in "iu" and given.size:
        limits = np.iinfo(wanted)
        fits = int(given.min()) >= limits.min and int(given.max()) <= limits.max
    if not fits and given.size:
        raise InputError(
            f"'{spec.name}' holds what is no {spec.dtype} ({given.dtype})", "give such numbers"
        )
    return given.astype(wanted)
