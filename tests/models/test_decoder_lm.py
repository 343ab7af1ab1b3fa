"""The decoder against a NumPy one in float64, its caches, padding and window."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from attn_export.models.decoder_lm import (
    DecoderLM,
    DecoderLMConfig,
    decoder_lm,
    decoder_lm_window,
)

SMALL = {"vocab": 19, "dim": 24, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 20}


def model(window: int | None = None) -> DecoderLM:
    torch.manual_seed(0)
    return DecoderLM(DecoderLMConfig(**SMALL, window=window)).eval().double()


def reference(lm: DecoderLM, ids: list[int], window: int | None) -> np.ndarray:
    """Logits of one sentence without padding: embed, attend, SwiGLU, all from the papers."""
    w = {name: value.detach().numpy() for name, value in lm.state_dict().items()}
    N, K, H, S = 4, 2, 6, len(ids)

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * scale

    def heads(x: np.ndarray, weight: np.ndarray, count: int, turn: bool) -> np.ndarray:
        y = (x @ weight.T).reshape(S, count, H)
        if turn:
            angles = np.outer(np.arange(S), 10000.0 ** (-np.arange(0, H, 2) / H))[:, None]
            pairs = (y[..., : H // 2] + 1j * y[..., H // 2 :]) * np.exp(1j * angles)
            y = np.concatenate([pairs.real, pairs.imag], axis=-1)
        return y

    x = w["embed.weight"][ids]
    for i in range(2):
        b = f"blocks.{i}."
        h = norm(x, w[b + "norm1.weight"])
        q = heads(h, w[b + "attention.query.weight"], N, True)
        k = heads(h, w[b + "attention.key.weight"], K, True)
        v = heads(h, w[b + "attention.value.weight"], K, False)
        y = np.zeros((S, N, H))
        for s in range(S):
            first = 0 if window is None else max(0, s - window + 1)
            for n in range(N):
                e = np.exp(k[first : s + 1, n // 2] @ q[s, n] / np.sqrt(H))
                y[s, n] = e @ v[first : s + 1, n // 2] / e.sum()
        x = x + y.reshape(S, -1) @ w[b + "attention.proj.weight"].T
        h = norm(x, w[b + "norm2.weight"])
        gate = h @ w[b + "mlp.gate.weight"].T
        up = h @ w[b + "mlp.up.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[b + "mlp.down.weight"].T
    return norm(x, w["norm.weight"]) @ w["head.weight"].T


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (2, 7), (3, 13)])
def test_logits_equal_a_numpy_model(window: int | None, batch: int, tokens: int) -> None:
    lm = model(window)
    ids = torch.randint(19, (batch, tokens))
    logits, mask, _ = lm(ids)
    assert mask.tolist() == [[1] * tokens] * batch
    for row, sentence in zip(logits, ids.tolist(), strict=True):
        right = reference(lm, sentence, window)
        np.testing.assert_allclose(row.detach().numpy(), right, rtol=1e-9, atol=1e-11)


def masks(tokens: int) -> dict[str, Tensor]:
    slot = torch.arange(tokens)
    return {
        "none": slot >= 0,
        "holes": slot % 3 != 1,
        "left pad": slot >= tokens // 2,
        "right pad": slot < tokens // 2,
        "blocked": slot < 0,
    }


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("name", masks(1))
def test_unmasked_tokens_see_only_unmasked_tokens(window: int | None, name: str) -> None:
    """Another word under the mask changes no logit of a real token, and nothing is NaN."""
    lm, mask = model(window), masks(9)[name]
    ids = torch.randint(19, (1, 9))
    other = torch.where(mask, ids, (ids + 1) % 19)
    logits, _, _ = lm(ids, mask[None].long())
    again, _, _ = lm(other, mask[None].long())
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[0, mask], again[0, mask], rtol=1e-10, atol=1e-12)


def test_holes_count_for_no_position_without_a_window() -> None:
    lm, mask = model(), masks(9)["holes"]
    ids = torch.randint(19, (1, 9))
    logits, _, _ = lm(ids, mask[None].long())
    dense, _, _ = lm(ids[:, mask])
    torch.testing.assert_close(logits[:, mask], dense, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("factory", [decoder_lm, decoder_lm_window])
@pytest.mark.parametrize("name", ["none", "holes", "left pad", "right pad"])
def test_decoding_after_prefill_equals_one_pass(factory: object, name: str) -> None:
    parts = factory()
    prefill, decode = parts["prefill"], parts["decode"]
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 512, (2, 16), generator=generator)
    prompt = masks(10)[name].long().expand(2, -1)
    everything = torch.cat([prompt, torch.ones(2, 6).long()], dim=1)
    with torch.no_grad():
        once = prefill.module(input_ids=ids, attention_mask=everything)
        full = dict(zip(prefill.outputs, once, strict=True))
        outputs = prefill.module(input_ids=ids[:, :10], attention_mask=prompt)
        for t in range(10, 16):
            got = dict(zip(decode.outputs, outputs, strict=True))
            feed = {decode.parameter(into): got[out] for out, into, _ in decode.state}
            outputs = decode.module(input_ids=ids[:, t : t + 1], **feed)
            torch.testing.assert_close(outputs[0][:, 0], full["logits"][:, t], rtol=1e-4, atol=1e-5)
    for output, right in zip(outputs[1:], list(full.values())[1:], strict=True):
        torch.testing.assert_close(output, right, rtol=1e-4, atol=1e-5)


def test_every_cache_is_handed_from_an_output_to_an_input() -> None:
    decode = decoder_lm()["decode"]
    assert decode.state == (
        ("present_mask", "past_mask", 1),
        ("present.0.key", "past_key_values.0.key", 2),
        ("present.0.value", "past_key_values.0.value", 2),
        ("present.1.key", "past_key_values.1.key", 2),
        ("present.1.value", "past_key_values.1.value", 2),
    )
    assert {decode.parameter(into) for _, into, _ in decode.state} < set(decode.inputs)
    assert {out for out, _, _ in decode.state} < set(decode.outputs)


def test_left_padded_prompts_continue_as_they_do_alone() -> None:
    lm = model()
    short, long = torch.randint(19, (1, 4)), torch.randint(19, (1, 9))
    padded = torch.cat([torch.zeros(1, 5).long(), short], dim=1)
    mask = torch.tensor([[0] * 5 + [1] * 4, [1] * 9])
    together = lm.generate(torch.cat([padded, long]), mask, 6)
    assert torch.equal(together[:1], lm.generate(short, torch.ones_like(short), 6))
    assert torch.equal(together[1:], lm.generate(long, torch.ones_like(long), 6))


def test_a_window_hides_tokens_behind_it() -> None:
    """Two layers with a window of 3 reach 2 * 2 tokens back, so token 4 is the oldest for 8."""
    lm = model(window=3)
    ids = torch.randint(19, (1, 9))
    last = lm(ids)[0][0, -1]
    for t in range(9):
        changed = ids.clone()
        changed[0, t] = (ids[0, t] + 1) % 19
        same = torch.equal(lm(changed)[0][0, -1], last)
        assert same == (t < 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab": 0}, "every size must be positive"),
        ({"window": 0}, "a window of 0 hides every key"),
        ({"heads": 8, "dim": 24}, "needs an even head size, not 3"),
        ({"kv_heads": 3}, "heads 4 is not a multiple of kv_heads 3"),
    ],
)
def test_bad_sizes_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecoderLMConfig(**(SMALL | change))
