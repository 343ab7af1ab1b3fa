"""GRU encoder-decoder with additive attention (Bahdanau, Cho and Bengio, 2014)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

from attn_export.models.attention.additive import AdditiveAttention


@dataclass(frozen=True)
class RNNTranslatorConfig:
    source_vocab: int
    target_vocab: int
    embedding: int = 48
    hidden: int = 96
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if min(self.source_vocab, self.target_vocab, self.embedding, self.hidden) < 1:
            raise ValueError(f"every size must be positive: {self}")


class MaskedGRU(nn.Module):
    """A GRU in one direction that keeps its state over masked tokens, wherever they are."""

    def __init__(self, inputs: int, hidden: int, reverse: bool) -> None:
        super().__init__()
        self.cell = nn.GRUCell(inputs, hidden)
        self.reverse = reverse

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Inputs (B, S, D) and bool mask (B, S) to states (B, S, hidden)."""

        def step(state: Tensor, token: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            x_t, mask_t = token
            state = torch.where(mask_t.unsqueeze(1), self.cell(x_t, state), state)
            return state, state.clone()

        state = x.new_zeros(x.shape[0], self.cell.hidden_size)
        tokens = (x.transpose(0, 1), mask.transpose(0, 1))  # time first
        # A Python loop over time would fix the length in an exported graph; scan runs slowly
        # outside of one.
        run = scan if torch.compiler.is_exporting() else _loop
        _, states = run(step, state, tokens, reverse=self.reverse)
        states_BSD: Tensor = states.transpose(0, 1)
        return states_BSD


def _loop(
    step: Callable[[Tensor, tuple[Tensor, Tensor]], tuple[Tensor, Tensor]],
    state: Tensor,
    tokens: tuple[Tensor, Tensor],
    *,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    states = []
    times = list(zip(*tokens, strict=True))
    for token in reversed(times) if reverse else times:
        state, output = step(state, token)
        states.append(output)
    return state, torch.stack(states[::-1] if reverse else states)


class RNNEncoder(nn.Module):
    """Source tokens to annotations, and the decoder's first hidden state."""

    def __init__(self, config: RNNTranslatorConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.source_vocab, config.embedding)
        self.dropout = nn.Dropout(config.dropout)
        self.ahead = MaskedGRU(config.embedding, config.hidden, reverse=False)
        self.back = MaskedGRU(config.embedding, config.hidden, reverse=True)
        self.bridge = nn.Linear(config.hidden, config.hidden)

    def forward(self, source_ids: Tensor, source_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Both int64 (B, S) -> memory (B, S, 2*hidden), hidden (B, hidden)."""
        mask = source_mask.bool()
        x = self.dropout(self.embed(source_ids))  # (B, S, embedding)
        ahead, back = self.ahead(x, mask), self.back(x, mask)  # (B, S, hidden)
        memory = torch.cat([ahead, back], dim=2)  # (B, S, 2*hidden)
        hidden = torch.tanh(self.bridge(back[:, 0]))  # (B, hidden)
        return memory, hidden


class RNNDecoderStep(nn.Module):
    """One target token: attend with the last state, advance the state, predict."""

    def __init__(self, config: RNNTranslatorConfig) -> None:
        super().__init__()
        annotation = 2 * config.hidden
        self.embed = nn.Embedding(config.target_vocab, config.embedding)
        self.dropout = nn.Dropout(config.dropout)
        self.attention = AdditiveAttention(config.hidden, annotation, config.hidden)
        self.cell = nn.GRUCell(config.embedding + annotation, config.hidden)
        self.deep = nn.Linear(config.hidden + config.embedding + annotation, config.hidden)
        self.head = nn.Linear(config.hidden, config.target_vocab)

    def forward(
        self, input_ids: Tensor, source_mask: Tensor, hidden: Tensor, memory: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The last token (B, 1), mask (B, T), hidden (B, hidden), memory (B, T, 2*hidden).

        Returns logits (B, 1, V), the weights over source tokens (B, T), the next hidden state.
        """
        x = self.dropout(self.embed(input_ids.squeeze(1)))  # (B, embedding)
        context, attention = self.attention(hidden, memory, source_mask.bool())
        hidden = self.cell(torch.cat([x, context], dim=1), hidden)  # (B, hidden)
        deep = torch.tanh(self.deep(torch.cat([hidden, x, context], dim=1)))  # (B, hidden)
        logits = self.head(self.dropout(deep)).unsqueeze(1)  # (B, 1, V)
        return logits, attention, hidden


class RNNTranslator(nn.Module):
    """Encoder and decoder with teacher forcing; see RNNDecoderStep for one step."""

    def __init__(self, config: RNNTranslatorConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = RNNEncoder(config)
        self.decoder = RNNDecoderStep(config)

    def forward(self, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor) -> Tensor:
        """Target tokens (B, L), the first one `<bos>`, to logits (B, L, V)."""
        memory, hidden = self.encoder(source_ids, source_mask)
        logits = []
        for token in target_ids.unsqueeze(2).unbind(dim=1):  # each (B, 1)
            step, _, hidden = self.decoder(token, source_mask, hidden, memory)
            logits.append(step)
        return torch.cat(logits, dim=1)

    @torch.no_grad()
    def translate(
        self, source_ids: Tensor, source_mask: Tensor, bos: int, max_length: int
    ) -> tuple[Tensor, Tensor]:
        """Greedy: token ids (B, max_length) and attention (B, max_length, T)."""
        memory, hidden = self.encoder(source_ids, source_mask)
        token = torch.full_like(source_ids[:, :1], bos)
        tokens, weights = [], []
        for _ in range(max_length):
            logits, attention, hidden = self.decoder(token, source_mask, hidden, memory)
            token = logits.argmax(dim=2)  # (B, 1)
            tokens.append(token)
            weights.append(attention)
        return torch.cat(tokens, dim=1), torch.stack(weights, dim=1)
