"""Trains a translator of the model zoo on its toy grammar and stores the weights.

    python examples/train_translator.py translator
    python examples/train_translator.py rnn-translator

Each takes some minutes on one core. Held-out sentences have an adjective-noun pair that training
sentences never have.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from attn_export.models import toy_french as toy
from attn_export.models.rnn_translator import RNNTranslator, RNNTranslatorConfig
from attn_export.models.translator import Translator, TranslatorConfig

WEIGHTS = Path(__file__).resolve().parents[1] / "attn_export" / "models" / "weights"


def build(name: str) -> Translator | RNNTranslator:
    if name == "translator":
        return Translator(TranslatorConfig(len(toy.ENGLISH), len(toy.FRENCH)))
    return RNNTranslator(RNNTranslatorConfig(len(toy.ENGLISH), len(toy.FRENCH)))


def exact_match(model: Translator | RNNTranslator, pairs: list[toy.Pair]) -> float:
    source, mask = toy.encode([p.english for p in pairs], toy.ENGLISH)
    tokens, _ = model.eval().translate(source, mask, toy.BOS, toy.MAX_TARGET)
    french = toy.decode(tokens, toy.FRENCH)
    return sum(a == p.french for a, p in zip(french, pairs, strict=True)) / len(pairs)


def alignment(model: Translator | RNNTranslator, pairs: list[toy.Pair]) -> float:
    """How often a colour that French moves behind its noun attends most to the English colour."""
    source, mask = toy.encode([p.english for p in pairs], toy.ENGLISH)
    tokens, attention = model.eval().translate(source, mask, toy.BOS, toy.MAX_TARGET)
    hits = []
    for pair, row, weights in zip(pairs, tokens.tolist(), attention, strict=True):
        english = pair.english.split()
        for adjective in toy.ADJECTIVES_AFTER:
            steps = [i for i, t in enumerate(row) if toy.FRENCH[t] in adjective.french]
            if english.count(adjective.singular) == len(steps) == 1:
                place = english.index(adjective.singular)
                hits.append(int(weights[steps[0]].argmax()) == place)
    return sum(hits) / max(len(hits), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=("translator", "rnn-translator"))
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=WEIGHTS)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    train = toy.Grammar(torch.Generator().manual_seed(options.seed))
    held_out = toy.Grammar(torch.Generator().manual_seed(10_000)).pairs(1000, held_out=True)
    model = build(options.model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=options.steps)
    start = time.perf_counter()
    for step in range(1, options.steps + 1):
        pairs = train.pairs(options.batch, held_out=False)
        source, mask = toy.encode([p.english for p in pairs], toy.ENGLISH)
        target, _ = toy.encode([p.french for p in pairs], toy.FRENCH)
        given = F.pad(target[:, :-1], (1, 0), value=toy.BOS)
        logits = model.train()(source, mask, given)  # (B, L, V)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=toy.PAD)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 250 == 0 or step == options.steps:
            sample = held_out if step == options.steps else held_out[:200]
            score, aligned = exact_match(model, sample), alignment(model, sample)
            seconds = time.perf_counter() - start
            print(
                f"step {step}  loss {loss.item():.4f}  held-out exact match {score:.4f}  "
                f"aligned {aligned:.4f}  {seconds:.0f} s",
                flush=True,
            )
    options.output.mkdir(parents=True, exist_ok=True)
    name = options.model.replace("-", "_")
    save_file(model.eval().state_dict(), options.output / f"{name}.safetensors")


if __name__ == "__main__":
    main()
