"""A bundle that is open, with what its manifest declares around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from attn_export import bundle as bundles
from attn_export.errors import FileError, InputError
from attn_export.parity.tolerance import Array
from attn_export.predict.answers import Answer, tell
from attn_export.predict.declared import Declared
from attn_export.predict.opening import declared_by, samples_of, taken
from attn_export.predict.reading import Reader, Sample
from attn_export.predict.sources import Source
from attn_export.predict.telling import Generate
from attn_export.predict.texts import TextReader
from attn_export.production.inputs import Signature
from attn_export.production.loading import AUTO, load
from attn_export.runtimes.base import TensorSpec

BATCH = 8
See = Callable[[Sample, Answer], None]


class Predictor:
    """Answers samples in batches; what concerns one sample alone becomes its own error.

    Args:
        runtime, threads: as `attn_export.load` takes them.
        declared: in place of the manifest's own, with other options.
    """

    def __init__(
        self,
        bundle: Path | str | bundles.Bundle,
        runtime: str = AUTO,
        *,
        threads: int | None = None,
        batch_size: int = BATCH,
        declared: Declared | None = None,
    ) -> None:
        found = bundle if isinstance(bundle, bundles.Bundle) else bundles.read(Path(bundle))
        self.bundle, self.declared = found, declared or declared_by(found)
        self.signature = taken(found)
        steps = self.declared.text
        self.texts = TextReader(found.path, steps) if steps else None
        self.reader = Reader(self.declared, self.signature.inputs, self.texts)
        self.session = load(found, runtime, threads=threads)
        self.rows, self.fixed = _rows(self.signature, batch_size)

    def predict(self, inputs: Sequence[str | Path] = (), texts: Sequence[str] = ()) -> list[Answer]:
        """One answer for each sample in files, folders and patterns, then for each text.

        Raises:
            UsageError: there is no such file, or nothing of a known kind in it.
        """
        samples = samples_of(self.declared, self.signature, inputs, texts)
        return self.answer(samples.between(0, len(samples)))

    def answer(
        self, samples: Iterable[tuple[Source, int]], see: See = lambda *_: None
    ) -> list[Answer]:
        """One answer a sample, in order; `error` in place of an answer where there is none.

        Args:
            see: is called with each sample that was answered, and its answer.
        """
        answers: list[Answer] = []
        held: list[Sample] = []
        for position, (source, row) in enumerate(samples):
            try:
                sample = self.reader.read(source, row)
            except (FileError, InputError) as error:
                answers += self._together(held, see)
                held = []
                answers.append(_failed(source.label(row), error))
                continue
            sample.position = position
            if held and (len(held) == self.rows or _sizes(held[0]) != _sizes(sample)):
                answers += self._together(held, see)
                held = []
            held.append(sample)
        return answers + self._together(held, see)

    def _together(self, samples: list[Sample], see: See) -> list[Answer]:
        """A batch; where the model refuses it, each sample alone, to find the one it refuses."""
        if not samples:
            return []
        try:
            told = self._run(samples)
        except (FileError, InputError) as error:
            if len(samples) == 1:
                return [_failed(samples[0].name, error)]
            return [self._together([sample], see)[0] for sample in samples]
        answers = [
            {"input": sample.name, **sample.told, **answer}
            for sample, answer in zip(samples, told, strict=True)
        ]
        for sample, answer in zip(samples, answers, strict=True):
            see(sample, answer)
        return answers

    def _run(self, samples: list[Sample]) -> list[Answer]:
        inputs = self.inputs(samples)
        if isinstance(self.declared.post, Generate):
            tokens = self.session.generate(inputs)
            return [self._written(row.tolist()) for row in tokens[: len(samples)]]
        outputs = self.session.run(inputs)
        for name, array in outputs.items():
            if array.ndim == 0 or len(array) < len(samples):
                raise FileError(
                    f"output '{name}' has shape {array.shape} for {len(samples)} samples",
                    "run it from Python with attn_export.load",
                )
        return [
            tell(self._of_row(outputs, row, sample), sample, self.declared)
            for row, sample in enumerate(samples)
        ]

    def inputs(self, samples: Sequence[Sample]) -> dict[str, Array]:
        """The arrays of a batch; a graph of a fixed batch gets its last sample repeated."""
        rows = [*samples, *[samples[-1]] * (self.rows - len(samples) if self.fixed else 0)]
        batch = {name: np.stack([s.arrays[name] for s in rows]) for name in rows[0].arrays}
        texts = [sample.text for sample in rows if sample.text is not None]
        if texts and self.texts:
            batch |= self.texts.batch(texts, _least_tokens(self.signature, self.texts))
        return batch

    def _of_row(self, outputs: dict[str, Array], row: int, sample: Sample) -> dict[str, Array]:
        """One row of each output, without what stands on a text's padding."""
        found = {name: array[row] for name, array in outputs.items()}
        if sample.text is None or self.texts is None:
            return found
        size = _token_axis(self.signature, self.texts)
        length = len(sample.text.ids)
        part = slice(length) if self.texts.steps.side == "right" else slice(-length, None)
        shapes = {entry["name"]: entry["shape"] for entry in self.bundle.manifest["outputs"]}
        for name, array in found.items():
            for axis, declared in enumerate(shapes[name][1:]):
                if declared == size:
                    array = array[(slice(None),) * axis + (part,)]
            found[name] = array
        return found

    def _written(self, ids: list[int]) -> Answer:
        end = self.bundle.manifest["generate"]["eos"]
        kept = ids[: ids.index(end)] if end in ids else ids
        if isinstance(self.declared.post, Generate) and self.declared.post.decode == "labels":
            return {"answer": " ".join(self.declared.labels[i] for i in kept), "ids": kept}
        assert self.texts is not None  # read() refuses a manifest without it
        return {"answer": self.texts.decode(kept), "ids": kept}

    def close(self) -> None:
        self.session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _rows(signature: Signature, wanted: int) -> tuple[int, bool]:
    """Samples a batch, and whether the graph takes that number alone."""
    size = signature.inputs[0].shape[0]
    if isinstance(size, int):
        return size, True
    most = signature.ranges.get(size, (1, wanted))[1]
    return min(wanted, most), False


def _sizes(sample: Sample) -> tuple[Any, ...]:
    return (
        sample.text is not None,
        *((name, array.shape, array.dtype.str) for name, array in sample.arrays.items()),
    )


def _token_axis(signature: Signature, texts: TextReader) -> int | str:
    """The name of the axis that runs over tokens; 0, which is no size, where it is fixed."""
    ids = next(name for name, what in texts.steps.inputs.items() if what == "ids")
    spec: TensorSpec = next(spec for spec in signature.inputs if spec.name == ids)
    size = spec.shape[1] if len(spec.shape) > 1 else 0
    return size if isinstance(size, str) else 0


def _least_tokens(signature: Signature, texts: TextReader) -> int:
    axis = _token_axis(signature, texts)
    return signature.ranges.get(axis, (1, 1))[0] if isinstance(axis, str) else 1


def _failed(name: str, error: FileError | InputError) -> Answer:
    return {"input": name, "error": str(error)}
