"""What `predict` tells of a file is what PyTorch answers on it, read without our code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from attn_export.build import export
from attn_export.models.detector_digits import detector_digits
from attn_export.models.digit_scenes import digit_scenes
from attn_export.models.digit_scenes import heldout_digits as digits_to_paste
from attn_export.models.vit_digits import vit_digits
from attn_export.predict.predictor import Predictor
from tests.boundary import Cli, Environment, run


def torch_top(path: Path) -> list[tuple[int, float]]:
    pixels = torch.from_numpy(np.asarray(Image.open(path)).copy()).float() / 255
    with torch.no_grad():
        scores = vit_digits().module(pixels[None, None]).softmax(1)[0]
    best = scores.topk(5)
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def told_top(row: dict[str, Any]) -> list[tuple[int, float]]:
    return [(entry["index"], entry["score"]) for entry in row["top"]]


def same(ours: list[tuple[int, float]], theirs: list[tuple[int, float]]) -> None:
    assert [index for index, _ in ours] == [index for index, _ in theirs]
    assert [score for _, score in ours] == pytest.approx([score for _, score in theirs], abs=2e-6)


def test_digits_are_told_as_pytorch_tells_them(
    cli: Cli, digits_bundle: Path, digit_files: list[Path]
) -> None:
    ended = cli("predict", digits_bundle, digit_files[0].parent, "--json", "--batch-size", "4")
    assert (ended.code, ended.stderr) == (0, "")
    results = ended.json["results"]
    assert [row["input"] for row in results] == [str(path) for path in digit_files]
    for path, row in zip(digit_files, results, strict=True):
        same(told_top(row), torch_top(path))
        assert row["top"][0]["label"] == str(row["top"][0]["index"])


def test_python_gets_the_same_answers(digits_bundle: Path, digit_files: list[Path]) -> None:
    with Predictor(digits_bundle, batch_size=3) as predictor:
        answers = predictor.predict([digit_files[2], digit_files[0].parent])
    assert [row["input"] for row in answers] == [str(digit_files[2]), *map(str, digit_files)]
    same(told_top(answers[0]), torch_top(digit_files[2]))
    same(told_top(answers[3]), torch_top(digit_files[2]))


def test_workers_keep_the_order_and_draw_each_image(
    cli: Cli, digits_bundle: Path, digit_files: list[Path], tmp_path: Path
) -> None:
    inputs = [digit_files[0].parent, digit_files[3], digit_files[0].parent]
    one = cli("predict", digits_bundle, *inputs, "--json", "--top", "2", "--batch-size", "3")
    two = cli("predict", digits_bundle, *inputs, "--json", "--top", "2", "--batch-size", "3",
              "--workers", "2", "--draw", "drawn")  # fmt: skip
    assert (two.code, two.stderr) == (0, "")
    drawn = [row.pop("drawn") for row in two.json["results"]]
    names = [row["input"] for row in two.json["results"]]
    assert names == [str(p) for p in (*digit_files, digit_files[3], *digit_files)]
    for mine, other in zip(one.json["results"], two.json["results"], strict=True):
        same(told_top(mine), told_top(other))
    assert len(set(drawn)) == len(names) == 21
    assert drawn[10] == "drawn/000010-03.png"
    with Image.open(tmp_path / drawn[10]) as picture:
        shown = np.asarray(picture.convert("L"))[:240, :240]
    np.testing.assert_array_equal(shown[::30, ::30], np.asarray(Image.open(digit_files[3])))


def test_the_table_names_file_and_classes(
    cli: Cli, digits_bundle: Path, digit_files: list[Path]
) -> None:
    ended = cli("predict", digits_bundle, digit_files[0], "--top", "1")
    assert ended.code == 0
    index, score = torch_top(digit_files[0])[0]
    assert f"{index} {score:.3f}" in ended.stdout
    assert digit_files[0].name in ended.stdout


def test_a_production_machine_needs_the_extra_for_images_and_no_torch(
    cpu_environment: Environment, digits_bundle: Path, digit_files: list[Path], tmp_path: Path
) -> None:
    ended = run([cpu_environment.script, "predict", digits_bundle, digit_files[0]], cwd="/")
    assert ended.code == 3
    assert ended.sentence == (
        "this needs PIL and tokenizers, which is not installed; run"
        " `pip install 'attn-export[predict]'`."
    )
    np.save(tmp_path / "a.npy", np.zeros((2, 1, 8, 8), np.float32))
    arrays = run([cpu_environment.script, "predict", digits_bundle, tmp_path / "a.npy", "--json"])
    assert arrays.code == 0, arrays.stderr
    assert len(arrays.json["results"]) == 2


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export("detector-digits", tmp_path_factory.mktemp("detector") / "bundle").path


def torch_detections(path: Path) -> list[list[float]]:
    """The whole image in 160 by 160 pixels, grey around it; boxes back in its own pixels."""
    image = Image.open(path)
    ratio = min(160 / image.width, 160 / image.height)
    size = (round(image.width * ratio), round(image.height * ratio))
    canvas = Image.new("RGB", (160, 160), (114, 114, 114))
    left, top = (160 - size[0]) // 2, (160 - size[1]) // 2
    canvas.paste(image.resize(size, Image.Resampling.BILINEAR), (left, top))
    pixels = torch.from_numpy(np.asarray(canvas).copy()).permute(2, 0, 1)[None].float() / 255
    with torch.no_grad():
        rows = detector_digits().module(pixels)[0]
    kept = rows[rows[:, 4] >= 0.25]
    kept[:, :4] -= torch.tensor([left, top, left, top])
    kept[:, :4] /= torch.tensor([size[0] / image.width, size[1] / image.height] * 2)
    low, high = torch.zeros(4), torch.tensor([image.width, image.height] * 2)
    kept[:, :4] = kept[:, :4].clamp(low, high)
    return kept.tolist()


def test_boxes_are_pytorchs_in_the_images_own_pixels(
    cli: Cli, detector: Path, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(5)
    truths = {}
    for index, (height, width) in enumerate([(200, 300), (160, 160), (310, 170)]):
        images, boxes = digit_scenes(*digits_to_paste(), 1, generator, height, width)
        pixels = (images[0].permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{index}.png")
        truths[f"{index}.png"] = [row for row in boxes[0].tolist() if row[4] >= 0]
    ended = cli("predict", detector, *truths, "--json", "--draw", "drawn", "--batch-size", "2")
    assert (ended.code, ended.stderr) == (0, "")
    found = 0
    for row, (name, truth) in zip(ended.json["results"], truths.items(), strict=True):
        theirs = torch_detections(tmp_path / name)
        assert row["input"] == name
        assert len(row["detections"]) == len(theirs)
        for ours, wanted in zip(row["detections"], theirs, strict=True):
            np.testing.assert_allclose(ours["box"], wanted[:4], atol=2e-3)
            assert ours["score"] == pytest.approx(wanted[4], abs=1e-4)
            assert ours["index"] == int(wanted[5])
            found += any(
                ours["index"] == int(t[4]) and np.abs(np.subtract(ours["box"], t[:4])).max() < 10
                for t in truth
            )
        with Image.open(tmp_path / row["drawn"]) as picture, Image.open(tmp_path / name) as image:
            larger = 2 if max(image.size) < 240 else 1
            assert picture.size == (image.width * larger, image.height * larger)
            plain = np.asarray(image.resize(picture.size, Image.Resampling.NEAREST))
            assert (np.asarray(picture) != plain).any() == bool(theirs)
    assert found >= 2  # and some of them are where the digits were put
    scores = [entry["score"] for row in ended.json["results"] for entry in row["detections"]]
    least = sorted(scores)[len(scores) // 2]
    strict = cli("predict", detector, *truths, "--json", "--threshold", str(least - 1e-5))
    told = [entry["score"] for row in strict.json["results"] for entry in row["detections"]]
    assert told == pytest.approx([score for score in scores if score >= least], abs=1e-5)
    assert 0 < len(told) < len(scores)


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "good", "bad", "thing"]


def text_folder(folder: Path) -> Path:
    """A small classifier of texts as save_pretrained writes it, with its tokenizer."""
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )  # fmt: skip
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", model_max_length=8
    ).save_pretrained(folder)
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=12, id2label={0: "fine", 1: "foul", 2: "so"},
    )  # fmt: skip
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def test_a_transformers_folder_brings_its_tokenizer_and_labels(cli: Cli, tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "hf")
    bundle = export(f"hf:{folder}", tmp_path / "bundle")
    assert (bundle.path / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert "tokenizer.json" in bundle.manifest["files"]
    texts = ["a good thing", "bad", "a b c good bad thing a b c"]
    (tmp_path / "t.txt").write_text("\n".join(texts[:2]) + "\n")
    (tmp_path / "p.jsonl").write_text(json.dumps({"text": "a b", "pair": "bad c", "id": 7}))
    ended = cli("predict", "bundle", "t.txt", "p.jsonl", "--text", texts[2], "--json")
    assert (ended.code, ended.stderr) == (0, "")
    results = ended.json["results"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    asked: list[tuple[str, ...]] = [(texts[0],), (texts[1],), ("a b", "bad c"), (texts[2],)]
    for row, words in zip(results, asked, strict=True):
        encoded = tokenizer(*words, truncation=True, return_tensors="pt")
        given = {name: encoded[name] for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            scores = model(**given).logits.softmax(1)[0]
        theirs = scores.topk(3)
        same(told_top(row), list(zip(theirs.indices.tolist(), theirs.values.tolist(), strict=True)))
        assert row["top"][0]["label"] == model.config.id2label[row["top"][0]["index"]]
    assert [row.get("truncated", False) for row in results] == [False, False, False, True]
    assert results[2]["id"] == 7
    assert [row["input"] for row in results[:3]] == ["t.txt:1", "t.txt:2", "p.jsonl:1"]
