"""What a model says about itself, so that it can be exported and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Axis:
    """A size that may differ from call to call, with its inclusive range."""

    name: str
    min: int
    max: int


@dataclass(frozen=True)
class Group:
    """Part of an output that is judged on its own scale, e.g. a detector's boxes in pixels."""

    name: str
    axis: int
    start: int
    stop: int


@dataclass(frozen=True)
class Metric:
    """A held-out task score: what users mean by "still as accurate".

    Attributes:
        kind: "top1" (classifier), "map50" (detector) or "exact-match" (sequences).
        output: the output that is scored.
        inputs: input name to a stack of samples; the leading axis runs over samples.
        target: the right answers, one row a sample.
        drop: how much the score may fall in another precision than float32.
    """

    kind: str
    output: str
    inputs: Mapping[str, Tensor]
    target: Tensor
    drop: float | None = None


Draw = Callable[[torch.Generator, Mapping[str, int], bool], dict[str, Tensor]]
"""(generator, size by axis name, masked) -> inputs. Unmasked: every mask allows everything."""


@dataclass
class ExportSpec:
    """A module with its example inputs and the facts that the inputs alone do not show.

    Attributes:
        module: the model, in eval mode.
        inputs: example inputs by `forward`'s parameter names, in its order.
        dynamic: input name -> axis number -> Axis. Axes of the same name are equal.
        outputs: a name for each tensor that `forward` returns, in order.
        draw: seeded inputs at other sizes.
        compare: output name -> "elementwise" (default), "index:SCORES[:AXIS]", "sorted:SCORES",
            "index" or "detections"; attn_export.parity.rules says what each means.
        masked: output (B, S, ...) -> input (B, S) that is 0 where its positions do not count, or
            "not:INPUT" where it is 1 there.
        groups: output name -> its groups; an output without any is one group.
        labels: class names of a classifier or detector.
        metric: a held-out score.
        state: (output, input, axis) of each cache that a step hands to the next, by the graph's
            names; a cache grows on its axis.
        generate: "bos", "eos", "max_length" where there is a loop.
        names: parameter -> the input's name in the graph, where a parameter cannot carry it
            (`past_key_values.0.key`).
        right_padded: parameter -> the number that keeps a key, for each mask (B, T) that its user
            promises to be right padded.
        remove_padding: which of them says what tokens are not to be computed. Outputs (B, S, ...)
            are then masked by it.
        cache_capacity: the most positions of the caches, where these are to be buffers that past
            and present share, see attn_export.fixed_caches.
        preprocess: parameter -> the steps from an image file to it, as docs/predict.md has them.
        tokenizer: the steps from a text to ids and masks; `file` is a path here, and is copied.
        postprocess: `kind` and more: what `predict` tells of the outputs.
    """

    module: nn.Module
    inputs: dict[str, Tensor]
    dynamic: dict[str, dict[int, Axis]] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    draw: Draw | None = None
    compare: dict[str, str] = field(default_factory=dict)
    masked: dict[str, str] = field(default_factory=dict)
    groups: dict[str, tuple[Group, ...]] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    metric: Metric | None = None
    state: tuple[tuple[str, str, int], ...] = ()
    generate: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    right_padded: dict[str, int] = field(default_factory=dict)
    remove_padding: tuple[str, ...] = ()
    cache_capacity: int | None = None
    preprocess: dict[str, dict[str, Any]] = field(default_factory=dict)
    tokenizer: dict[str, Any] = field(default_factory=dict)
    postprocess: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.remove_padding:
            self.right_padded.setdefault(name, 1)

    def parameter(self, name: str) -> str:
        """The parameter behind the name of a graph's input."""
        return next((p for p, graph_name in self.names.items() if graph_name == name), name)

    def axes(self) -> dict[str, dict[int, Axis]]:
        """`dynamic` by the names of the graph's inputs."""
        return {self.names.get(name, name): axes for name, axes in self.dynamic.items()}

    def promises(self) -> dict[str, int]:
        """`right_padded` by the names of the graph's inputs."""
        return {self.names.get(name, name): keeps for name, keeps in self.right_padded.items()}

    def removed(self) -> tuple[str, ...]:
        """`remove_padding` by the names of the graph's inputs."""
        return tuple(self.names.get(name, name) for name in self.remove_padding)
