"""What one attention computes, and what becomes of it on a target."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import onnx_ir as ir

from attn_export.attention.reasons import NotLowerable, Reason

Size = int | str
Mask = Literal["none", "bool", "additive", "lengths"]
Causal = Literal["none", "upper-left", "lower-right", "unknown"]
Status = Literal["lowered", "decomposed-by-choice", "refused"]
Proved = Literal["run", "stand-in", "rule", "no"]
BlockedRows = Literal["same", "zero", "mean", "nan"]


@dataclass(frozen=True)
class Site:
    """One softmax attention: softmax(scale * Q K^T, softcapped, masked) V.

    Q is (B, N, S, H), K is (B, K, T, H), V is (B, K, T, Hv) as standard Attention (ONNX operator
    specification, opset 23) takes them; its 3-D form is read as the same.

    Attributes:
        node: the standard Attention node in the canonical graph; for a softmax that could not be
            made one, the node that ends it.
        kind: "self", "cross" or "causal"; self and causal project Q, K and V from one value.
            "additive" where the scores are no product of queries and keys.
        head_size, v_head_size: H and Hv; 0 where it is not known or not fixed, null in JSON.
        query_tokens, key_tokens: S and T; a symbolic size is a string.
        causal: alignment of a causal flag, or of a dense mask that lets no query see later keys.
        window: how many keys a query sees at most, itself included.
        exact: whether a dense mask is `causal` and `window` and nothing more, for every input.
        lengths: int32 (B,) where its mask is `causal` and "lengths": each row sees so many first
            keys. The node's own mask says the same, see `dense`.
        scale: the factor on Q K^T; 1 / sqrt(H) where the node has none.
    """

    name: str
    node: ir.Node
    kind: str
    heads: int
    kv_heads: int
    head_size: int
    v_head_size: int
    query_tokens: Size
    key_tokens: Size
    mask: Mask
    causal: Causal
    scale: float
    softcap: float
    window: int | None = None
    exact: bool = False
    lengths: ir.Value | None = None

    @property
    def tokens(self) -> tuple[Size, Size]:
        return self.query_tokens, self.key_tokens

    @property
    def signature(self) -> tuple[object, ...]:
        """Sites with equal signatures compute the same function of their inputs."""
        return (
            self.kind, self.heads, self.kv_heads, self.head_size, self.v_head_size,
            self.query_tokens, self.key_tokens, self.mask, self.causal, self.scale, self.softcap,
            self.window, self.exact,
        )  # fmt: skip

    @property
    def dense(self) -> Site:
        """The same site with the mask of its node, which any op that takes a mask can have."""
        if self.mask != "lengths":
            return self
        return replace(self, mask=mask_kind(self.node), lengths=None)


def mask_kind(node: ir.Node) -> Mask:
    """What the mask of a standard Attention node is by its dtype."""
    mask = node.inputs[3] if len(node.inputs) > 3 else None
    if mask is None:
        return "none"
    return "bool" if mask.dtype == ir.DataType.BOOL else "additive"


@dataclass(frozen=True)
class Outcome:
    """What a site became on one target.

    Attributes:
        lowering: "com.microsoft.X", "ai.onnx.Attention" or "decomposed"; None where the site stays
            as it was.
        status: "refused" where no fused op took it, also if it could be decomposed.
        reasons: why each op that was preferred did not take it, the most general op last.
        proved: "run" on the target's runtime, "stand-in" on another, "rule" by argument, "no".
        blocked_rows: what a query gets whose mask allows no key, compared with PyTorch.
        example_tokens: S and T at the example's sizes; None where they are not known.
        rule: why the plain form is the one that is wanted, where it is; or by which measurement an
            op is.
        in_place: whether its cache is to be continued in place.
    """

    site: Site
    lowering: str | None
    status: Status
    reasons: tuple[NotLowerable, ...] = ()
    proved: Proved = "no"
    blocked_rows: BlockedRows = "same"
    example_tokens: tuple[int, int] | None = None
    rule: str = ""
    in_place: bool = False

    @property
    def reason(self) -> str:
        """In words; why it was refused, or why a faster form was not taken."""
        if self.rule:
            return self.rule
        why = "; ".join(dict.fromkeys(map(str, self.reasons)))
        return f"other ops were passed over: {why}" if why and self.status == "lowered" else why

    @property
    def code(self) -> Reason | None:
        """Why the most general op did not take it, for a site that is refused."""
        return self.reasons[-1].reason if self.status == "refused" and self.reasons else None

    def to_json(self) -> dict[str, Any]:
        """The object that `inspect --json` prints for a site."""
        site = {
            key: value
            for key, value in vars(self.site).items()
            if key not in ("node", "exact", "lengths")
        }
        outcome = {
            key: value
            for key, value in vars(self).items()
            if key not in ("site", "reasons", "rule") and (key != "in_place" or self.in_place)
        }
        for size in ("head_size", "v_head_size"):
            site[size] = site[size] or None
        pairs = self.example_tokens[0] * self.example_tokens[1] if self.example_tokens else None
        said = {"reason": self.reason, "code": self.code, "query_key_pairs": pairs}
        return {**site, **outcome, **said}


@dataclass(frozen=True)
class Beside:
    """Rotary embedding or linear attention: no site, but with an op of its own.

    Attributes:
        name: of the node that ends it.
        lowering: "com.microsoft.X" or "ai.onnx.X"; None where it stays as it was.
        reasons: why each op that was tried did not take it.
    """

    name: str
    lowering: str | None
    reasons: tuple[NotLowerable, ...] = ()

    @property
    def reason(self) -> str:
        return "; ".join(dict.fromkeys(map(str, self.reasons)))

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "lowering": self.lowering, "reason": self.reason}


@dataclass(frozen=True)
class Work:
    """Work that reaches no output that counts, and whether it was taken out of the graph.

    Attributes:
        kind: "fewer-tokens"; "padding" of shorter rows, "padding-of-all-rows" behind the longest.
        name: of the node behind which it lies; of the mask that says what is padding.
        saves: the operators that are computed for less, in words.
        reason: why it was left, where it was.
    """

    kind: str
    name: str
    applied: bool
    saves: str
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Account:
    """Every site of a graph: `total` is counted by a module that shares nothing with the finder.

    Attributes:
        unrecognised: (node name, reason's code, in words) of each that the counter saw and the
            finder did not take.
        other: linear, deformable and channel attention, which no softmax gives away.
        rotary, linear: what was found of these, and what it became.
        work: what reaches no output.
    """

    outcomes: tuple[Outcome, ...]
    total: int
    unrecognised: tuple[tuple[str, Reason, str], ...] = ()
    other: tuple[str, ...] = ()
    rotary: tuple[Beside, ...] = ()
    linear: tuple[Beside, ...] = ()
    work: tuple[Work, ...] = ()

    @property
    def lowered(self) -> int:
        return sum(outcome.status == "lowered" for outcome in self.outcomes)

    @property
    def refused(self) -> int:
        return sum(o.status == "refused" for o in self.outcomes) + len(self.unrecognised)

    def to_json(self) -> dict[str, Any]:
        """The `inspect --json` object without its "model"."""
        missed = [
            {"name": name, "kind": None, "lowering": None, "status": "refused",
             "reason": why, "code": code, "proved": "no"}
            for name, code, why in self.unrecognised
        ]  # fmt: skip
        return {
            "sites": [outcome.to_json() for outcome in self.outcomes] + missed,
            "total": self.total,
            "recognised": len(self.outcomes),
            "lowered": self.lowered,
            "refused": self.refused,
            "other": list(self.other),
            "rotary": [found.to_json() for found in self.rotary],
            "linear": [found.to_json() for found in self.linear],
            "work": [found.to_json() for found in self.work],
        }
