"""Texts: tokens by hand, batches with padding, sentences that a loop writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from attn_export.build import export
from attn_export.errors import FileError, InputError
from attn_export.models import toy_french as toy
from attn_export.models.text_encoder import text_encoder
from attn_export.models.translators import held_out_sentences, load_translator
from attn_export.predict.predictor import Predictor
from attn_export.predict.steps import TextSteps
from attn_export.predict.texts import TextReader

FILLS = {"ids": "ids", "mask": "mask", "types": "types"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer of single words: a is 1, b is 2, c is 3; it would pad and cut on its own."""
    made = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "c": 3}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.enable_padding(length=9)
    made.enable_truncation(1)
    made.save(str(tmp_path / "t.json"))
    return tmp_path


def reader(folder: Path, **options: Any) -> TextReader:
    return TextReader(folder, TextSteps("t.json", FILLS, **{"max_length": 4, **options}))


@pytest.mark.parametrize(
    ("options", "ids", "mask"),
    [
        ({}, [[1, 2, 3], [2, 0, 0]], [[1, 1, 1], [1, 0, 0]]),
        ({"side": "left", "pad_id": 7}, [[1, 2, 3], [7, 7, 2]], [[1, 1, 1], [0, 0, 1]]),
        ({"padding": "max_length"}, [[1, 2, 3, 0], [2, 0, 0, 0]], [[1, 1, 1, 0], [1, 0, 0, 0]]),
    ],
)
def test_texts_are_padded_as_declared(
    folder: Path, options: dict[str, Any], ids: list[list[int]], mask: list[list[int]]
) -> None:
    texts = reader(folder, **options)
    batch = texts.batch([texts.encode("a b c"), texts.encode("b")])
    assert (batch["ids"].tolist(), batch["mask"].tolist()) == (ids, mask)
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int64)}
    assert texts.batch([texts.encode("b")], least=2)["ids"].shape[1] >= 2


def test_a_pair_has_types_and_long_texts_are_cut_or_refused(folder: Path) -> None:
    texts = reader(folder)
    assert texts.encode("a b", "c").types == [0, 0, 1]
    assert not texts.encode("a b c a").cut
    cut = texts.encode("a b c a b")
    assert (cut.ids, cut.cut) == ([1, 2, 3, 1], True)
    with pytest.raises(InputError, match="the text has 5 tokens, the model takes 4"):
        reader(folder, truncate=False).encode("a b c a b")
    with pytest.raises(InputError, match="the text has no tokens"):
        texts.encode("  ")


def test_a_file_that_is_no_tokenizer_is_one_sentence(folder: Path) -> None:
    (folder / "t.json").write_text("{}")
    with pytest.raises(FileError, match=r"t\.json is no tokenizer \("):
        reader(folder)


def test_embeddings_of_a_padded_batch_are_pytorchs_for_each_text_alone(tmp_path: Path) -> None:
    bundle = export("text-encoder", tmp_path / "bundle")
    texts = ["good water", "the model has a head", "a"]
    with Predictor(bundle) as predictor:
        answers = predictor.predict(texts=texts)
    spec = text_encoder()
    tokenizer = Tokenizer.from_file(str(spec.tokenizer["file"]))
    for text, answer in zip(texts, answers, strict=True):
        ids = torch.tensor([tokenizer.encode(text).ids])
        with torch.no_grad():
            sentence, _ = spec.module(ids, torch.ones_like(ids))
        assert answer["text"] == text
        np.testing.assert_allclose(answer["embedding"], sentence[0].numpy(), atol=2e-5)


def test_a_translator_writes_the_sentences_that_pytorch_writes(tmp_path: Path) -> None:
    bundle = export("translator", tmp_path / "bundle")
    pairs = held_out_sentences(12)
    with Predictor(bundle, batch_size=5) as predictor:
        answers = predictor.predict(texts=[*(pair.english for pair in pairs), "the zebra sleeps"])
    model = load_translator()
    for pair, answer in zip(pairs, answers[:-1], strict=True):
        ids, mask = toy.encode([pair.english], toy.ENGLISH)
        with torch.no_grad():
            tokens, _ = model.translate(ids, mask, toy.BOS, toy.MAX_TARGET)
        (theirs,) = toy.decode(tokens, toy.FRENCH)
        assert answer["answer"] == theirs
    right = sum(a["answer"] == pair.french for pair, a in zip(pairs, answers, strict=False))
    assert right >= 9
    assert answers[-1]["error"].startswith("the text does not encode (WordLevel error")
