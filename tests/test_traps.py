"""What people hit when they export attention, from the source to the answers of ONNX Runtime.

Scores are all zero where nothing else is said, so that an answer is the mean of the values 0, 1, 2,
3 of the keys that a query may see: a wrong mask is a wrong mean, with no question of tolerance.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_export import verify
from attn_export.build import export
from attn_export.bundle import Bundle
from attn_export.models.spec import Axis, ExportSpec
from attn_export.sessions import load
from attn_export.source import Source


def bundled(spec: ExportSpec, folder: Path) -> Bundle:
    spec.module.eval()
    return export(Source("trap", "nowhere:build", {"model": spec}), folder / "bundle")


def answers(bundle: Bundle, **inputs: Tensor) -> dict[str, np.ndarray]:
    with load(bundle, "ort-cpu") as session:
        return session.run({name: value.numpy() for name, value in inputs.items()})


class Probes(nn.Module):
    """One output for each trap of a mask, a scale or a head; inputs that are all zero but values.

    `query`, `key` (1, 1, 4, 8) are zero, `value` (1, 1, 4, 1) is 0, 1, 2, 3.
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, hole: Tensor, left: Tensor
    ) -> dict[str, Tensor]:
        sdpa = F.scaled_dot_product_attention
        place = torch.arange(4)
        last_blocked = torch.where(place == 3, float("-inf"), 0.0)
        window = (place[:, None] >= place) & (place[:, None] - place < 2)
        some = torch.ones(4, 4, dtype=torch.bool).tril(-1)  # the first query sees nothing
        heads = [x.expand(-1, n, -1, -1) for x, n in ((query, 4), (key, 2))]
        numbered = torch.cat([value * 0 + 1, value * 0 + 2], dim=1)
        capped = 2 * torch.tanh(query @ key.transpose(2, 3) / 2) + last_blocked
        one_hot = torch.eye(64)[:2].view(1, 1, 2, 64) + query.sum()
        eight = 8 * one_hot[:, :, :1]
        two_keys = torch.cat([one_hot[:, :, :1], one_hot[:, :, :1] * 0], dim=2)
        first = torch.tensor([[1.0], [0.0]]).view(1, 1, 2, 1) + 0 * value.sum()
        by_hand = (eight @ two_keys.transpose(2, 3)).softmax(-1) @ first
        bias = last_blocked.nan_to_num(neginf=-4.0)[2:]
        return {
            "causal_one": sdpa(query[:, :, :1], key, value, is_causal=True),
            "causal_two": sdpa(query[:, :, :2], key, value, is_causal=True),
            "holes": sdpa(query, key, value, attn_mask=hole.bool()[:, None, None]),
            "left_padding": sdpa(query, key, value, attn_mask=left.bool()[:, None, None]),
            "blocked": sdpa(query, key, value, attn_mask=some),
            "grouped": sdpa(heads[0], heads[1], numbered, enable_gqa=True),
            "grouped_both_ways": sdpa(
                heads[0], heads[1], value.expand(-1, 2, -1, -1), enable_gqa=True
            ),
            "window": sdpa(query, key, value, attn_mask=window),
            "softcap": capped.softmax(-1) @ value,
            "scale": sdpa(eight, two_keys, first, scale=0.5),
            "scaled_outside": sdpa(0.5 * eight, two_keys, first, scale=1.0),
            "no_scale": by_hand,
            "bias": sdpa(eight * 0, two_keys, first, attn_mask=bias[None, None, None], scale=0.125),
        }


EXPECTED = {
    "causal_one": [0.0],
    "causal_two": [0.0, 0.5],
    "holes": [1.0] * 4,
    "left_padding": [2.5] * 4,
    "blocked": [0.0, 0.0, 0.5, 1.0],
    "grouped": [1.0] * 8 + [2.0] * 8,
    "grouped_both_ways": [1.5] * 16,
    "window": [0.0, 0.5, 1.5, 2.5],
    "softcap": [1.0] * 4,
    "scale": [0.98201],
    "scaled_outside": [0.98201],
    "no_scale": [1 / (1 + np.exp(-8))],
    "bias": [0.98201],
}
ZEROS = torch.zeros(1, 1, 4, 8)
PROBES = {
    "query": ZEROS,
    "key": ZEROS,
    "value": torch.arange(4.0).view(1, 1, 4, 1),
    "hole": torch.tensor([[1, 0, 1, 0]]),
    "left": torch.tensor([[0, 0, 1, 1]]),
}


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return bundled(ExportSpec(Probes(), PROBES), tmp_path_factory.mktemp("probes"))


@pytest.fixture(scope="module")
def means(probes: Bundle) -> dict[str, np.ndarray]:
    return answers(probes, **PROBES)


def test_every_probe_is_a_site_and_none_is_missed(probes: Bundle) -> None:
    (target,) = probes.targets()
    assert (target["total"], target["recognised"]) == (len(EXPECTED), len(EXPECTED))
    assert verify(probes).passed


@pytest.mark.parametrize("name", EXPECTED)
def test_the_mean_that_can_be_written_down(means: dict[str, np.ndarray], name: str) -> None:
    assert means[name].ravel().tolist() == pytest.approx(EXPECTED[name], abs=1e-5)


MASKS = [(3, 4), (1, 1, 1, 4), (2, 1, 1, 4), (2, 1, 3, 4), (2, 2, 3, 4)]


class Masked(nn.Module):
    def forward(
        self, query: Tensor, key: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor
    ) -> tuple[Tensor, ...]:
        sdpa = F.scaled_dot_product_attention
        return tuple(sdpa(query, key, key, attn_mask=mask) for mask in (a, b, c, d, e))


def test_masks_of_every_shape_give_what_eager_gives(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = {name: torch.randn(2, 2, size, 8, generator=generator)
              for name, size in (("query", 3), ("key", 4))}  # fmt: skip
    for name, shape in zip("abcde", MASKS, strict=True):
        inputs[name] = torch.rand(shape, generator=generator) > 0.4
        inputs[name][..., 1] = True
    bundle = bundled(ExportSpec(Masked(), inputs), tmp_path)
    assert bundle.targets()[0]["recognised"] == 5
    assert verify(bundle).passed


class Cached(nn.Module):
    """is_causal with one query and all keys: each step attends to the first key alone."""

    def forward(self, query: Tensor, key: Tensor, past: Tensor) -> Tensor:
        keys = torch.cat([past, key], dim=2)
        return F.scaled_dot_product_attention(query * 0, keys, keys, is_causal=True)


def test_causal_with_a_cache_stays_what_pytorch_computes_and_is_warned_of(tmp_path: Path) -> None:
    past = torch.arange(7.0).view(1, 1, 7, 1).expand(1, 2, 7, 8) + 1
    inputs = {"query": torch.ones(1, 2, 1, 8), "key": torch.full((1, 2, 1, 8), 9.0), "past": past}
    bundle = bundled(ExportSpec(Cached(), inputs), tmp_path)
    (y,) = answers(bundle, **inputs).values()
    assert y.ravel().tolist() == [1.0] * 16  # the first key's value, as eager gives it
    assert verify(bundle).passed
    assert any("is causal from the upper left" in note for note in bundle.manifest["notes"])


@pytest.mark.parametrize("weights", [True, False])
def test_a_head_that_sees_nothing_is_nan_or_zero_as_the_call_gives_it(
    tmp_path: Path, weights: bool
) -> None:
    """nn.MultiheadAttention gives NaN with need_weights and zeros without."""

    class Call(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(3, 3, batch_first=True)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            y: Tensor = self.attention(x, x, x, attn_mask=mask, need_weights=weights)[0]
            return y

    mask = torch.zeros(3, 5, 5, dtype=torch.bool)
    mask[1] = True  # True is blocked here, where SDPA attends
    inputs = {"x": torch.randn(1, 5, 3, generator=torch.Generator().manual_seed(0)), "mask": mask}
    bundle = bundled(ExportSpec(Call(), inputs), tmp_path)
    told = any("PyTorch's own 'output' is NaN" in note for note in bundle.manifest["notes"])
    assert told is weights
    assert verify(bundle).passed is not weights  # nothing can be compared with NaN alone


def test_large_logits_pass_and_one_that_is_off_does_not(tmp_path: Path) -> None:
    """An error of 3e-3 is rounding on logits of 1e3, and a fault on logits of 1."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(F.scaled_dot_product_attention(x, x, x)) * 1e3
            return y

    torch.manual_seed(0)
    spec = ExportSpec(Large(), {"x": torch.randn(2, 4, 64)}, {"x": {0: Axis("batch", 1, 8)}})
    result = verify(bundled(spec, tmp_path), metrics=["top1"])
    assert result.passed
    worst = result.runtimes["ort-cpu"].worst()["output"]
    assert 1e-5 < worst.allowed < 1.0  # beyond a fixed 1e-5, far below a break of 6.75
    assert result.runtimes["ort-cpu"].scores == {"top1": 1.0}


class Windowed(nn.Module):
    """Window partition and reverse as Swin's own code has them, with the batch as a number."""

    def forward(self, x: Tensor) -> Tensor:
        B, H, W, C = x.shape
        y = x.roll((-1, -1), (1, 2)).view(B, H // 2, 2, W // 2, 2, C)
        y = y.permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, C)
        y = F.scaled_dot_product_attention(y, y, y)
        batch = int(y.shape[0] / (H * W / 2 / 2))
        y = y.view(batch, H // 2, W // 2, 2, 2, C).permute(0, 1, 3, 2, 4, 5)
        return y.reshape(batch, H, W, C).roll((1, 1), (1, 2))


def test_windows_whose_batch_is_a_number_are_never_silently_wrong(tmp_path: Path) -> None:
    """Either every batch is right, or the batch is fixed and that is said."""
    x = torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    bundle = bundled(ExportSpec(Windowed(), {"x": x}), tmp_path)
    assert verify(bundle).passed
    fixed = any("the batch is fixed" in note for note in bundle.manifest["notes"])
    (entry,) = bundle.manifest["inputs"]
    assert fixed == (entry["shape"][0] != "batch")


def test_four_equal_rows_of_deformable_attention_give_four_equal_answers(tmp_path: Path) -> None:
    """Points inside, on the edge and outside of two maps."""

    class Sampled(nn.Module):
        def forward(self, points: Tensor, large: Tensor, small: Tensor) -> Tensor:
            grid = 2 * points - 1
            return F.grid_sample(large, grid, align_corners=False) + F.grid_sample(
                small, grid, align_corners=False
            )

    generator = torch.Generator().manual_seed(0)
    points = torch.tensor([[0.5, 0.5], [0.0, 1.0], [-0.3, 0.5], [1.2, 1.2]]).view(1, 2, 2, 2)
    inputs = {
        "points": points.expand(4, -1, -1, -1),
        "large": torch.randn(1, 2, 8, 8, generator=generator).expand(4, -1, -1, -1),
        "small": torch.randn(1, 2, 4, 4, generator=generator).expand(4, -1, -1, -1),
    }
    bundle = bundled(ExportSpec(Sampled(), inputs), tmp_path)
    (y,) = answers(bundle, **inputs).values()
    assert (y == y[:1]).all()
    assert verify(bundle).passed


class AreaAttention(nn.Module):
    """YOLO's: a convolution for q, k, v, keys half as wide as values, positions convolved on v."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Conv2d(64, 128, 1)
        self.place, self.out = nn.Conv2d(64, 64, 3, padding=1, groups=64), nn.Conv2d(64, 64, 1)

    def forward(self, x: Tensor) -> Tensor:
        B, C, H, W = x.shape
        q, k, v = self.qkv(x).view(B, 2, 64, H * W).split([16, 16, 32], dim=2)
        weights = (q.transpose(2, 3) @ k * 16**-0.5).softmax(-1)
        y = (v @ weights.transpose(2, 3)).view(B, C, H, W)
        out: Tensor = self.out(y + self.place(v.reshape(B, C, H, W)))
        return out


def test_attention_on_a_map_is_right_at_other_sizes_and_batches(tmp_path: Path) -> None:
    torch.manual_seed(0)
    axes = {0: Axis("batch", 1, 4), 2: Axis("height", 4, 16), 3: Axis("width", 4, 16)}
    spec = ExportSpec(AreaAttention(), {"x": torch.randn(2, 64, 8, 8)}, {"x": axes})
    bundle = bundled(spec, tmp_path)
    assert bundle.targets()[0]["lowered"] == 1
    result = verify(bundle)
    assert result.passed
    assert {"batch=3 height=10 width=10", "batch=1 height=16 width=16"} <= set(result.cases)


@pytest.mark.parametrize("causal", [False, True])
def test_a_linear_feature_map_far_below_zero_is_the_mean_and_no_softmax(
    tmp_path: Path, causal: bool
) -> None:
    """elu(-8) + 1 is 3.3546e-4 in float32; with 0 the answer would be 0/0."""

    class Linear(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k = F.elu(q) + 1, F.elu(k) + 1
            products = k[..., None] * v[..., None, :]  # (B, T, H, Hv)
            if causal:
                state, total = products.cumsum(1), k.cumsum(1)
            else:
                state, total = products.sum(1, keepdim=True), k.sum(1, keepdim=True)
            return (q[..., None] * state).sum(2) / (q * total).sum(2, keepdim=True)

    inputs = {"q": torch.full((1, 4, 8), -8.0), "k": torch.full((1, 4, 8), -8.0),
              "v": torch.arange(4.0).view(1, 4, 1)}  # fmt: skip
    bundle = bundled(ExportSpec(Linear(), inputs), tmp_path)
    (y,) = answers(bundle, **inputs).values()
    assert y.ravel().tolist() == pytest.approx([0, 0.5, 1, 1.5] if causal else [1.5] * 4, abs=1e-4)
    assert bundle.targets()[0]["total"] == 0
    assert verify(bundle).passed
