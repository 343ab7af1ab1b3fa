"""An export specification for each attention module, e.g. to export a single one by its name:
`attn-export export attn_export.models.attention.catalogue:cross`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from attn_export.models.attention.alibi import AlibiAttention, AlibiConfig
from attn_export.models.attention.channel import SqueezeExcitation
from attn_export.models.attention.channels_cross_covariance import (
    CrossCovarianceAttention,
    CrossCovarianceConfig,
)
from attn_export.models.attention.cross import CrossAttention, CrossAttentionConfig
from attn_export.models.attention.linear import (
    LinearAttention,
    LinearAttentionConfig,
    RecurrentAttention,
)
from attn_export.models.attention.multi_head import (
    MultiHeadAttention,
    MultiHeadConfig,
    TorchEncoder,
    TorchMultiheadAttention,
)
from attn_export.models.attention.scaled_dot_product import ScaledDotProductAttention
from attn_export.models.attention.sinks import SinkAttention, SinkConfig
from attn_export.models.attention.sliding_window import (
    SlidingWindowAttention,
    SlidingWindowConfig,
)
from attn_export.models.attention.softcap import SoftcapAttention, SoftcapConfig
from attn_export.models.attention.sparse import (
    BlockPattern,
    SparseAttention,
    SparseAttentionConfig,
)
from attn_export.models.attention.talking_heads import TalkingHeadsAttention, TalkingHeadsConfig
from attn_export.models.spec import Axis, ExportSpec

BATCH = Axis("batch", 1, 64)
TOKENS = Axis("tokens", 1, 4096)
KEYS = Axis("keys", 1, 4096)

Shape = tuple[Axis | int, ...]


def _spec(
    build: Callable[[], nn.Module], shapes: dict[str, Shape], outputs: tuple[str, ...] = ("output",)
) -> ExportSpec:
    """A spec in which an input named `*mask` is boolean and any other is normally distributed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = build().eval()

    def draw(
        generator: torch.Generator, sizes: Mapping[str, int], masked: bool
    ) -> dict[str, Tensor]:
        def tensor(name: str, shape: Shape) -> Tensor:
            size = [sizes[axis.name] if isinstance(axis, Axis) else axis for axis in shape]
            if not name.endswith("mask"):
                return torch.randn(size, generator=generator)
            allowed = torch.rand(size, generator=generator) < (0.7 if masked else 2.0)
            allowed[..., 0] = True  # holes, but no row without a key
            return ~allowed if name == "key_padding_mask" else allowed

        return {name: tensor(name, shape) for name, shape in shapes.items()}

    sizes = {"batch": 2, "tokens": 20, "keys": 12, "height": 6, "width": 5}
    return ExportSpec(
        module=module,
        inputs=draw(torch.Generator().manual_seed(0), sizes, True),
        dynamic={
            name: {i: axis for i, axis in enumerate(shape) if isinstance(axis, Axis)}
            for name, shape in shapes.items()
        },
        outputs=outputs,
        draw=draw,
    )


def _self_attention(
    build: Callable[[], nn.Module],
    mask: str = "key_mask",
    outputs: tuple[str, ...] = ("output",),
    tokens: Axis = TOKENS,
) -> ExportSpec:
    return _spec(build, {"x": (BATCH, tokens, 64), mask: (BATCH, tokens)}, outputs)


def scaled_dot_product() -> ExportSpec:
    shapes: dict[str, Shape] = {
        "query": (BATCH, 4, TOKENS, 16),
        "key": (BATCH, 4, KEYS, 16),
        "value": (BATCH, 4, KEYS, 24),
        "mask": (BATCH, 1, TOKENS, KEYS),
    }
    return _spec(lambda: ScaledDotProductAttention(fused=False), shapes)


def multi_head() -> ExportSpec:
    return _self_attention(lambda: MultiHeadAttention(MultiHeadConfig()))


def multi_head_weights() -> ExportSpec:
    """Separate projections, values wider than keys, weights returned."""
    config = MultiHeadConfig(head_size=8, v_head_size=24, packed=False, return_weights=True)
    return _self_attention(lambda: MultiHeadAttention(config), outputs=("output", "weights"))


def torch_multihead() -> ExportSpec:
    return _self_attention(
        lambda: TorchMultiheadAttention(return_weights=True, average_weights=False),
        mask="key_padding_mask",
        outputs=("output", "weights"),
    )


def torch_encoder() -> ExportSpec:
    return _self_attention(TorchEncoder, mask="key_padding_mask")


def cross() -> ExportSpec:
    shapes: dict[str, Shape] = {
        "x": (BATCH, TOKENS, 64),
        "context": (BATCH, KEYS, 48),
        "context_mask": (BATCH, KEYS),
    }
    return _spec(lambda: CrossAttention(CrossAttentionConfig()), shapes)


def sliding_window() -> ExportSpec:
    return _self_attention(lambda: SlidingWindowAttention(SlidingWindowConfig()))


def sliding_window_symmetric() -> ExportSpec:
    config = SlidingWindowConfig(window=5, causal=False)
    return _self_attention(lambda: SlidingWindowAttention(config))


def block_sparse() -> ExportSpec:
    return _self_attention(lambda: SparseAttention(SparseAttentionConfig()))


def block_sparse_causal() -> ExportSpec:
    config = SparseAttentionConfig(
        pattern=BlockPattern(block=4, offsets=(-4, -2, -1, 0), global_blocks=2, causal=True)
    )
    return _self_attention(lambda: SparseAttention(config))


def top_k() -> ExportSpec:
    config = SparseAttentionConfig(top_k=8)
    return _self_attention(lambda: SparseAttention(config), tokens=Axis("tokens", 8, 4096))


def linear() -> ExportSpec:
    return _self_attention(lambda: LinearAttention(LinearAttentionConfig()))


def linear_causal() -> ExportSpec:
    return _self_attention(lambda: LinearAttention(LinearAttentionConfig(causal=True)))


def _recurrent(rule: str) -> ExportSpec:
    shapes: dict[str, Shape] = {
        "x": (BATCH, TOKENS, 64),
        "past_state": (BATCH, 4, 16, 16),
        "key_mask": (BATCH, TOKENS),
    }
    return _spec(
        lambda: RecurrentAttention(LinearAttentionConfig(rule=rule)),
        shapes,
        outputs=("output", "present_state"),
    )


def linear_recurrent() -> ExportSpec:
    return _recurrent("linear")


def gated() -> ExportSpec:
    return _recurrent("gated")


def delta() -> ExportSpec:
    return _recurrent("delta")


def gated_delta() -> ExportSpec:
    return _recurrent("gated_delta")


def squeeze_excitation() -> ExportSpec:
    shape: Shape = (BATCH, 32, Axis("height", 1, 256), Axis("width", 1, 256))
    return _spec(lambda: SqueezeExcitation(32), {"x": shape})


def cross_covariance() -> ExportSpec:
    return _self_attention(lambda: CrossCovarianceAttention(CrossCovarianceConfig()))


def talking_heads() -> ExportSpec:
    return _self_attention(lambda: TalkingHeadsAttention(TalkingHeadsConfig()))


def softcap() -> ExportSpec:
    return _self_attention(lambda: SoftcapAttention(SoftcapConfig()))


def sinks() -> ExportSpec:
    return _self_attention(lambda: SinkAttention(SinkConfig()))


def alibi() -> ExportSpec:
    return _self_attention(lambda: AlibiAttention(AlibiConfig()))


CATALOGUE: dict[str, Callable[[], ExportSpec]] = {
    factory.__name__: factory
    for factory in (
        scaled_dot_product,
        multi_head,
        multi_head_weights,
        torch_multihead,
        torch_encoder,
        cross,
        sliding_window,
        sliding_window_symmetric,
        block_sparse,
        block_sparse_causal,
        top_k,
        linear,
        linear_causal,
        linear_recurrent,
        gated,
        delta,
        gated_delta,
        squeeze_excitation,
        cross_covariance,
        talking_heads,
        softcap,
        sinks,
        alibi,
    )
}
