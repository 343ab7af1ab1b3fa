"""`text-encoder`: BERT (Devlin et al., 2018) with mean-pooled sentence embeddings.

Pooling over the tokens that are not padding is "Sentence-BERT" (Reimers and Gurevych, 2019).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from attn_export.models.spec import Axis, ExportSpec


@dataclass(frozen=True)
class TextEncoderConfig:
    vocab: int = 512
    max_tokens: int = 128
    token_types: int = 2
    dim: int = 128
    layers: int = 3
    heads: int = 4
    hidden: int = 512
    norm_eps: float = 1e-12

    def __post_init__(self) -> None:
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not a multiple of heads {self.heads}")


class Embeddings(nn.Module):
    """Token, position and (always the first) type embeddings."""

    def __init__(self, config: TextEncoderConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.dim)
        self.positions = nn.Embedding(config.max_tokens, config.dim)
        self.types = nn.Embedding(config.token_types, config.dim)
        self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps)

    def forward(self, input_ids: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.tokens(input_ids) + self.positions(positions) + self.types.weight[0]
        out: Tensor = self.norm(x)
        return out


class Attention(nn.Module):
    def __init__(self, config: TextEncoderConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.dim, config.dim)
        self.key = nn.Linear(config.dim, config.dim)
        self.value = nn.Linear(config.dim, config.dim)
        self.proj = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        sizes = (self.heads, -1)
        q = self.query(x).unflatten(-1, sizes).transpose(1, 2)  # (B, N, S, H)
        k = self.key(x).unflatten(-1, sizes).transpose(1, 2)  # (B, N, S, H)
        v = self.value(x).unflatten(-1, sizes).transpose(1, 2)  # (B, N, S, H)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # (B, N, S, H)
        out: Tensor = self.proj(y.transpose(1, 2).flatten(2))  # (B, S, D)
        return out


class Layer(nn.Module):
    def __init__(self, config: TextEncoderConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.norm1 = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.up = nn.Linear(config.dim, config.hidden)
        self.down = nn.Linear(config.hidden, config.dim)
        self.norm2 = nn.LayerNorm(config.dim, eps=config.norm_eps)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, mask))
        x = x + self.down(F.gelu(self.up(x)))  # (B, S, D)
        out: Tensor = self.norm2(x)
        return out


class TextEncoder(nn.Module):
    def __init__(self, config: TextEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Both int64 (B, S), 0 in the mask for padding, S at most max_tokens.

        Returns the sentence embedding (B, D), which is the mean of the unmasked tokens and not
        normalised (zero without any), and the token embeddings (B, S, D).
        """
        x = self.embeddings(input_ids)  # (B, S, D)
        mask = attention_mask.bool()[:, None, None, :]  # (B, 1, 1, S)
        for layer in self.layers:
            x = layer(x, mask)
        weights = attention_mask.to(x.dtype).unsqueeze(2)  # (B, S, 1)
        sentence = (x * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1.0)
        return sentence, x


BERT_NAMES = {
    "embeddings.word_embeddings": "embeddings.tokens",
    "embeddings.position_embeddings": "embeddings.positions",
    "embeddings.token_type_embeddings": "embeddings.types",
    "embeddings.LayerNorm": "embeddings.norm",
}
BERT_LAYER_NAMES = {
    "attention.self.query": "attention.query",
    "attention.self.key": "attention.key",
    "attention.self.value": "attention.value",
    "attention.output.dense": "attention.proj",
    "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "norm2",
}


def load_bert(folder: str | Path) -> TextEncoder:
    """A BERT or MiniLM folder (`config.json` and `model.safetensors`) as a TextEncoder, float32.

    The pooler and the heads for other tasks are left out. Raises ValueError for a model that
    isn't BERT-like (another activation, relative positions) or lacks a weight, OSError for a
    missing file.
    """
    folder = Path(folder)
    facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    wanted = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
    for key, value in wanted.items():
        if facts.get(key, value) != value:
            raise ValueError(f"{folder} has {key} {facts[key]!r}; only {value!r} can be loaded")
    config = TextEncoderConfig(
        vocab=facts["vocab_size"],
        max_tokens=facts["max_position_embeddings"],
        token_types=facts["type_vocab_size"],
        dim=facts["hidden_size"],
        layers=facts["num_hidden_layers"],
        heads=facts["num_attention_heads"],
        hidden=facts["intermediate_size"],
        norm_eps=facts["layer_norm_eps"],
    )
    names = dict(BERT_NAMES)
    for i in range(config.layers):
        names |= {f"encoder.layer.{i}.{a}": f"layers.{i}.{b}" for a, b in BERT_LAYER_NAMES.items()}
    state = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        name, _, kind = key.removeprefix("bert.").rpartition(".")
        if name in names:
            state[f"{names[name]}.{kind}"] = tensor.float()
    with torch.random.fork_rng(devices=[]):
        model = TextEncoder(config)
    lacking = sorted(model.state_dict().keys() - state.keys())
    if lacking:
        raise ValueError(f"{folder} lacks the weights of {', '.join(lacking)}")
    model.load_state_dict(state)
    return model.eval()


BATCH, TOKENS = Axis("batch", 1, 64), Axis("tokens", 1, 128)
TOKENIZER = Path(__file__).parent / "weights" / "text_encoder_tokenizer.json"


def text_encoder() -> ExportSpec:
    """A small encoder with seeded random weights: `sentence` (B, D) and `tokens` (B, S, D)."""
    config = TextEncoderConfig()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = TextEncoder(config).eval()

    def draw(g: torch.Generator, sizes: Mapping[str, int], masked: bool) -> dict[str, Tensor]:
        shape = (sizes["batch"], sizes["tokens"])
        mask = torch.rand(shape, generator=g) > (0.3 if masked else -1.0)
        mask[:, 0] = True  # the start token
        ids = torch.randint(config.vocab, shape, generator=g)
        return {"input_ids": ids, "attention_mask": mask.long()}

    return ExportSpec(
        module=model,
        inputs=draw(torch.Generator().manual_seed(0), {"batch": 2, "tokens": 12}, False),
        dynamic={name: {0: BATCH, 1: TOKENS} for name in ("input_ids", "attention_mask")},
        outputs=("sentence", "tokens"),
        draw=draw,
        tokenizer={
            "file": TOKENIZER,
            "inputs": {"input_ids": "ids", "attention_mask": "mask"},
            "max_length": config.max_tokens,
        },
        postprocess={"kind": "embed", "output": "sentence"},
    )
