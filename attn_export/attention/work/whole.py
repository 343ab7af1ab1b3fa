"""Two whole graphs on padded batches: is what counts the same?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from attn_export import right_padded
from attn_export.attention.cutting import cut
from attn_export.attention.padding import is_per_token
from attn_export.attention.prove import Trial, prove_parts
from attn_export.attention.work.token_wise import Padded
from attn_export.errors import AttnExportError, one_line
from attn_export.onnx_files.inputs import draw

Bindings = Sequence[Mapping[str, int]]
FEW = (3, 9)  # rows and tokens: what is packed wrongly is so at any size, and these are soon run


def differs(
    before: ir.Model, after: ir.Model, padded: Padded, bindings: Bindings, *, evaluated: bool
) -> str:
    """How they differ, in words; empty where they do not.

    Args:
        padded: of `before`.
        bindings: sizes that the graph was made for; fewer tokens are tried first.
        evaluated: as `prove_parts` takes it; on ONNX Runtime lengths are drawn alone.
    """
    problem = ""
    for sizes in (_fewer(padded, bindings), bindings or [{}]):
        try:
            one, other = (cut(m, m.graph.inputs, m.graph.outputs) for m in (before, after))
            trials = _trials(before, padded, sizes, brief=not evaluated)
            proof = prove_parts(one, other, trials, evaluated=evaluated)
        except (AttnExportError, ValueError) as error:  # it cannot be cut out, or run
            problem = f"the whole graph was not run: {one_line(error)}"
            continue
        if not proof.problem:
            return ""
        return f"'{before.graph.outputs[proof.output].name}' depends on padding, on {proof.problem}"
    return problem


def _fewer(padded: Padded, bindings: Bindings) -> list[dict[str, int]]:
    """The same with a few rows and tokens, each once."""
    most = {str(size): few for size, few in zip(padded.sizes, FEW, strict=True)}
    small = [
        {name: min(size, most.get(name, size)) for name, size in binding.items()}
        for binding in bindings or [{}]
    ]
    return [binding for index, binding in enumerate(small) if binding not in small[:index]]


def _trials(model: ir.Model, padded: Padded, bindings: Bindings, *, brief: bool) -> Iterator[Trial]:
    """Rows of drawn lengths; all of one token, all full, and all shorter than they are padded to.

    Tokens at padding are drawn like the others.
    """
    mask, keeps = padded.mask, padded.keeps
    whole = [index for index, value in enumerate(model.graph.outputs) if is_per_token(value, mask)]
    for seed, binding in enumerate(bindings):
        inputs = draw(model, binding, True, seed)
        own = inputs[str(mask.name)]
        batch, tokens = own.shape
        rows = {
            "drawn lengths": right_padded.drawn(np.random.default_rng(seed), own.shape, keeps)[1],
            "short rows": np.maximum(1, (tokens + 1) // 2 - np.arange(batch)),
            "rows of one token": np.ones(batch, np.int64),
            "full rows": np.full(batch, tokens),
        }
        where = " ".join(f"{name}={size}" for name, size in binding.items())
        for told, lengths in list(rows.items())[: 1 if brief else None]:
            kept: NDArray[np.bool_] = np.arange(tokens) < lengths[:, None]
            named = {**inputs, str(mask.name): np.where(kept, keeps, 1 - keeps).astype(own.dtype)}
            numbered = {
                f"input_{index}": named[str(value.name)]
                for index, value in enumerate(model.graph.inputs)
            }
            name = f"{told}{' at ' + where if where else ''}"
            yield Trial(name, numbered, dict.fromkeys(whole, kept))
