"""The translators: trained accuracy, alignment, caches, and the grammar they learn."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attn_export.models import toy_french as toy
from attn_export.models.rnn_translator import MaskedGRU, RNNTranslator, RNNTranslatorConfig
from attn_export.models.spec import ExportSpec
from attn_export.models.translator import Attention, Translator, TranslatorConfig
from attn_export.models.translators import (
    held_out_sentences,
    load_rnn_translator,
    load_translator,
    rnn_translator,
    translator,
)

LOADERS = {"translator": load_translator, "rnn-translator": load_rnn_translator}
FACTORIES = {"translator": translator, "rnn-translator": rnn_translator}
both = pytest.mark.parametrize("name", LOADERS)


def french(name: str, sentences: list[str]) -> tuple[list[str], Tensor]:
    source, mask = toy.encode(sentences, toy.ENGLISH)
    tokens, attention = LOADERS[name]().translate(source, mask, toy.BOS, toy.MAX_TARGET)
    return toy.decode(tokens, toy.FRENCH), attention


@both
def test_held_out_sentences_are_translated_exactly(name: str) -> None:
    pairs = toy.Grammar(torch.Generator().manual_seed(123)).pairs(1000, held_out=True)
    answers, _ = french(name, [p.english for p in pairs])
    right = sum(a == p.french for a, p in zip(answers, pairs, strict=True))
    assert right >= 990


@both
@pytest.mark.parametrize(
    ("english", "expected"),
    [
        ("the black cat", "le chat noir"),
        ("the black mice", "les souris noires"),
        (
            "my big black car follows these old dogs",
            "ma grande voiture noire suit ces vieux chiens",
        ),
        ("the pretty hats are green", "les jolis chapeaux sont verts"),
    ],
)
def test_adjectives_are_reordered_and_agree(name: str, english: str, expected: str) -> None:
    assert french(name, [english])[0] == [expected]


@both
def test_noir_attends_most_to_black_though_it_comes_last(name: str) -> None:
    answers, attention = french(name, ["the black cat"])
    step = answers[0].split().index("noir")
    assert step == 2
    assert attention[0, step].argmax().item() == 1  # the, black, cat, <eos>
    assert attention[0, 1].argmax().item() == 2  # chat attends to cat
    assert attention[0, step].sum().item() == pytest.approx(1.0, abs=1e-5)


@both
def test_padding_of_the_source_changes_nothing(name: str) -> None:
    sentences = ["the black cat", "my big black car follows these old dogs"]
    answers, attention = french(name, sentences)
    for i, sentence in enumerate(sentences):
        alone, weights = french(name, [sentence])
        assert answers[i] == alone[0]
        length = weights.shape[2]
        torch.testing.assert_close(attention[i : i + 1, :, :length], weights, rtol=1e-3, atol=1e-5)
        assert attention[i, :, length:].eq(0).all()


@both
def test_steps_with_state_equal_the_full_pass(name: str) -> None:
    """The exported loop: encoder once, then the decoder with what its last call returned."""
    parts, model = FACTORIES[name](), LOADERS[name]()
    pairs = held_out_sentences(8)
    source_ids, source_mask = toy.encode([p.english for p in pairs], toy.ENGLISH)
    target, _ = toy.encode([p.french for p in pairs], toy.FRENCH)
    given = torch.nn.functional.pad(target[:, :-1], (1, 0), value=toy.BOS)
    with torch.no_grad():
        full = model(source_ids, source_mask, given)
        logits = loop(parts, source_ids, source_mask, given)
    torch.testing.assert_close(logits, full, rtol=1e-4, atol=1e-4)


def loop(parts: dict[str, ExportSpec], ids: Tensor, mask: Tensor, given: Tensor) -> Tensor:
    encoder, decoder = parts["encoder"], parts["decoder"]
    encoded = encoder.module(source_ids=ids, source_mask=mask)
    encoded = (encoded,) if isinstance(encoded, Tensor) else encoded
    feed = dict(zip(encoder.outputs, encoded, strict=True)) | {"source_mask": mask}
    for _, into, axis in decoder.state:
        name = decoder.parameter(into)
        shape = list(decoder.inputs[name].shape)
        shape[0], shape[axis] = len(ids), 0
        feed.setdefault(name, torch.zeros(shape))
    steps = []
    for t in range(given.shape[1]):
        feed["input_ids"] = given[:, t : t + 1]
        outputs = dict(zip(decoder.outputs, decoder.module(**feed), strict=True))
        feed |= {decoder.parameter(into): outputs[out] for out, into, _ in decoder.state}
        steps.append(outputs["logits"])
    return torch.cat(steps, dim=1)


@both
def test_the_metric_holds_the_encoders_inputs_and_the_right_tokens(name: str) -> None:
    metric = FACTORIES[name]()["decoder"].metric
    assert metric is not None
    assert metric.kind == "exact-match"
    tokens, _ = LOADERS[name]().translate(**metric.inputs, bos=toy.BOS, max_length=toy.MAX_TARGET)
    sentences = toy.decode(metric.target, toy.FRENCH)
    assert (
        sum(a == b for a, b in zip(toy.decode(tokens, toy.FRENCH), sentences, strict=True)) >= 198
    )


@both
def test_building_leaves_the_global_generator_alone(name: str) -> None:
    torch.manual_seed(5)
    right = torch.rand(1)
    torch.manual_seed(5)
    FACTORIES[name]()
    assert torch.equal(torch.rand(1), right)


def test_training_sentences_never_show_a_held_out_pair() -> None:
    pairs = toy.Grammar(torch.Generator().manual_seed(0)).pairs(3000, held_out=False)
    assert not any("black cat" in p.english for p in pairs)
    assert any("black dog" in p.english for p in pairs)
    assert all("black cat" not in p.english.replace("cats", "cat") for p in pairs)


def test_sentences_are_repeatable_and_fit_the_longest_translation() -> None:
    first, second = (
        toy.Grammar(torch.Generator().manual_seed(3)).pairs(500, held_out=True) for _ in "ab"
    )
    assert first == second
    assert max(len(p.french.split()) for p in first) < toy.MAX_TARGET


def test_words_become_padded_ids_and_back() -> None:
    ids, mask = toy.encode(["le chat noir", "le chat"], toy.FRENCH)
    assert mask.tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert ids[1, 2:].tolist() == [toy.EOS, toy.PAD]
    assert toy.decode(ids, toy.FRENCH) == ["le chat noir", "le chat"]


def test_an_unknown_word_is_named() -> None:
    with pytest.raises(ValueError, match=r"the vocabulary has no \['zebra'\]"):
        toy.encode(["the zebra"], toy.ENGLISH)


def test_a_masked_gru_equals_a_plain_one_on_the_unmasked_tokens() -> None:
    torch.manual_seed(0)
    x, keep = torch.randn(1, 6, 4), torch.tensor([[False, True, True, False, True, False]])
    for reverse in (False, True):
        masked = MaskedGRU(4, 5, reverse)
        plain = torch.nn.GRU(4, 5, batch_first=True)
        plain.load_state_dict({f"{k}_l0": v for k, v in masked.cell.state_dict().items()})
        short = x[:, keep[0]]
        right = plain(short.flip(1))[0].flip(1) if reverse else plain(short)[0]
        torch.testing.assert_close(masked(x, keep)[:, keep[0]], right)


def test_attention_with_weights_equals_the_fused_path() -> None:
    torch.manual_seed(0)
    attention = Attention(TranslatorConfig(10, 10, dim=16, heads=2)).double()
    x, memory = torch.randn(3, 4, 16).double(), torch.randn(3, 7, 16).double()
    mask = torch.rand(3, 1, 1, 7) > 0.4
    mask[0] = False  # a blocked row: both give zero
    y, weights = attention.with_weights(x, memory, mask)
    torch.testing.assert_close(y, attention(x, memory, mask), rtol=1e-10, atol=1e-12)
    sums = torch.tensor([0.0, 1.0, 1.0]).double()
    torch.testing.assert_close(weights.sum(dim=2), sums[:, None].expand(3, 4))


@both
def test_untrained_models_take_any_size(name: str) -> None:
    model: Translator | RNNTranslator
    if name == "translator":
        model = Translator(TranslatorConfig(11, 13, dim=24, heads=3, layers=1)).eval()
    else:
        model = RNNTranslator(RNNTranslatorConfig(11, 13, embedding=5, hidden=7)).eval()
    for B, S, L in ((1, 1, 1), (2, 5, 3), (3, 9, 8)):
        ids = torch.randint(11, (B, S))
        assert model(ids, torch.ones_like(ids), torch.randint(13, (B, L))).shape == (B, L, 13)


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="dim 20 is not a multiple of twice heads 4"):
        TranslatorConfig(10, 10, dim=20)
    with pytest.raises(ValueError, match="every size must be positive"):
        RNNTranslatorConfig(10, 10, hidden=0)
