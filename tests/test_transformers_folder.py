"""`hf:PATH`: folders that save_pretrained wrote, with small random models inside."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from attn_export.errors import ExportError, FileError
from attn_export.inspection import inspect_source
from attn_export.models.spec import ExportSpec
from attn_export.source import resolve

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 50,
}
BERT = transformers.BertConfig(**SMALL, max_position_embeddings=24)
VIT = transformers.ViTConfig(**SMALL, image_size=[16, 24], patch_size=8, num_labels=3)
LLAMA = transformers.LlamaConfig(**SMALL, max_position_embeddings=64)
T5 = transformers.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=50)
WHISPER = transformers.WhisperConfig(
    d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8,
    max_source_positions=12, max_target_positions=20, vocab_size=50, pad_token_id=0,
    bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
)  # fmt: skip


def saved(folder: Path, kind: str, config: transformers.PreTrainedConfig) -> str:
    torch.manual_seed(3)
    model = getattr(transformers, kind)(config)
    model.save_pretrained(folder)
    return f"hf:{folder}"


def spec_of(origin: str) -> ExportSpec:
    return resolve(origin).components["model"]


def shapes(spec: ExportSpec) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in spec.inputs.items()}


def test_the_saved_class_comes_back_with_its_weights(tmp_path: Path) -> None:
    origin = saved(tmp_path, "BertForSequenceClassification", BERT)
    source = resolve(origin)
    module = source.components["model"].module
    assert type(module).__name__ == "BertForSequenceClassification"
    torch.manual_seed(3)
    same = transformers.BertForSequenceClassification(BERT)
    for name, value in same.state_dict().items():
        np.testing.assert_array_equal(module.state_dict()[name], value)
    assert source.notes == []
    assert source.name == tmp_path.name


def test_text_has_two_padded_rows_and_a_length_up_to_the_model_s(tmp_path: Path) -> None:
    spec = spec_of(saved(tmp_path, "BertModel", BERT))
    assert shapes(spec) == {"input_ids": (2, 16), "attention_mask": (2, 16)}
    assert spec.inputs["attention_mask"].sum(1).tolist() == [16, 8]
    assert spec.dynamic["input_ids"][1].max == 24


@pytest.mark.parametrize(
    ("kind", "config", "expected"),
    [
        ("ViTForImageClassification", VIT, {"pixel_values": (2, 3, 16, 24)}),
        (
            "T5ForConditionalGeneration",
            T5,
            {"input_ids": (2, 16), "attention_mask": (2, 16), "decoder_input_ids": (2, 8)},
        ),
        (
            "WhisperForConditionalGeneration",
            WHISPER,
            {"input_features": (2, 8, 24), "decoder_input_ids": (2, 8)},
        ),
    ],
)
def test_the_example_fits_the_kind_of_model(
    tmp_path: Path,
    kind: str,
    config: transformers.PreTrainedConfig,
    expected: dict[str, tuple[int, ...]],
) -> None:
    spec = spec_of(saved(tmp_path, kind, config))
    assert shapes(spec) == expected
    with torch.no_grad():
        spec.module.eval()(**spec.inputs)


def test_a_decoder_is_one_pass_without_a_cache_and_says_so(tmp_path: Path) -> None:
    source = resolve(saved(tmp_path, "LlamaForCausalLM", LLAMA))
    assert source.notes == [
        "all tokens are computed in one pass, without a cache of keys and values"
    ]
    (account,) = inspect_source(source.origin, "cpu", lambda _: None)
    assert (account["total"], account["lowered"]) == (1, 1)


def test_weights_that_are_not_there_are_random_and_the_source_says_so(tmp_path: Path) -> None:
    origin = saved(tmp_path, "BertModel", BERT)
    (tmp_path / "model.safetensors").unlink()
    first, second = resolve(origin), resolve(origin)
    assert first.notes == [f"the weights are random: {tmp_path} holds no safetensors"]
    for name, value in first.components["model"].module.state_dict().items():
        np.testing.assert_array_equal(second.components["model"].module.state_dict()[name], value)


def test_half_precision_weights_become_float32_and_the_source_says_so(tmp_path: Path) -> None:
    transformers.BertModel(BERT).to(torch.bfloat16).save_pretrained(tmp_path)
    source = resolve(f"hf:{tmp_path}")
    assert source.notes == [
        f"the weights are torch.bfloat16 in {tmp_path}, and computed in float32"
    ]
    assert source.components["model"].module.dtype == torch.float32


def test_pickled_weights_are_not_loaded(tmp_path: Path) -> None:
    origin = saved(tmp_path, "BertModel", BERT)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileError, match=r"pickled \(pytorch_model\.bin\); save them as safetens"):
        resolve(origin)


def test_a_folder_without_a_config_is_bad(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"holds no config\.json"):
        resolve(f"hf:{tmp_path}")


def test_a_config_of_an_unknown_architecture_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nothing-of-that-kind"}')
    with pytest.raises(ExportError, match=r"hf:.* raised ValueError: .*nothing-of-that-kind"):
        resolve(f"hf:{tmp_path}")
