"""Models of the transformers package as users hand them over: nothing but the model and inputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_export.pipeline import Options, Outcome, export_and_verify
from tests.zoo.catalogue import CATALOGUE, FACTORIES, factory_name

FILE = Path(__file__).with_name("catalogue.py")
# One of each construct: the rest of the catalogue takes some minutes.
QUICK = {
    "vit_eager",  # no mask
    "swin_sdpa",  # shifted windows, position bias
    "segformer_eager",  # keys of another length
    "bert_sdpa",  # a padding mask, from transformers' masking utilities
    "albert_eager",  # layers that share weights
    "gpt2_sdpa",  # returns its cache unasked
    "llama_cached_sdpa",  # grouped heads, rotary embedding, caches in and out
    "mistral_eager",  # a window
    "gemma2_eager",  # softcap
    "t5_encoder_sdpa",  # position bias and padding mask
    "whisper_decoder_eager",  # cross-attention beside a cache
}
EXPLAINED: dict[str, dict[str, int]] = {}
"""Sites that no fused op takes: how many for each reason's code."""


def cases() -> list[object]:
    return [
        pytest.param(
            entry.sites,
            factory_name(name, attention),
            marks=[] if factory_name(name, attention) in QUICK else [pytest.mark.slow],
            id=factory_name(name, attention),
        )
        for name, entry in CATALOGUE.items()
        for attention in entry.attentions
    ]


@pytest.mark.parametrize(("sites", "name"), cases())
def test_every_site_is_lowered_or_explained_and_the_answers_stay(
    sites: int, name: str, tmp_path: Path
) -> None:
    made = export_and_verify(f"{FILE}:{name}", tmp_path / "bundle", Options(), lambda _: None)
    account = made.bundle.manifest["targets"][0]
    refused = [site["code"] for site in account["sites"] if site["status"] != "lowered"]
    assert account["total"] == sites
    assert {code: refused.count(code) for code in refused} == EXPLAINED.get(name, {})
    assert account["recognised"] + unrecognised(account) == sites
    (result,) = made.verification.runtimes.values()
    assert result.passed, result.failures
    assert_other_sizes_ran(made)


def unrecognised(account: dict[str, list[dict[str, object]]]) -> int:
    return sum(site["kind"] is None for site in account["sites"])


def assert_other_sizes_ran(made: Outcome) -> None:
    """Batch 1 and 3, and where there is a padding mask also holes in it."""
    inputs = {entry["name"] for entry in made.bundle.manifest["inputs"]}
    names = " | ".join(case.name for case in made.bundle.cases())
    assert "batch=1" in names
    assert "batch=3" in names
    assert ("attention_mask" in inputs) == ("masked" in names)


def test_quick_models_are_in_the_catalogue() -> None:
    assert set(FACTORIES) >= QUICK | set(EXPLAINED)
