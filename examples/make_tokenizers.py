"""Makes the tokenizers of `text-encoder` and the translators: `python examples/make_tokenizers.py`.

The text encoder's is a WordPiece of 512 entries, as BERT has it, made from this project's own
documentation. The translators' has the words of the toy grammar, and no others.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from attn_export.models import toy_french as toy
from attn_export.models.text_encoder import TextEncoderConfig

ROOT = Path(__file__).parent.parent
WEIGHTS = ROOT / "attn_export" / "models" / "weights"


def word_pieces() -> Tokenizer:
    """Lower-cased, `[CLS] text [SEP]`, with [PAD] as token 0."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=TextEncoderConfig().vocab, special_tokens=special, show_progress=False
    )
    texts = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    ascii_only = [t.read_text().encode("ascii", "ignore").decode() for t in texts]
    made.train_from_iterator(ascii_only, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, made.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
    return made


def words() -> Tokenizer:
    """The English of the grammar, an end token behind it; other words are refused."""
    vocabulary = {word: index for index, word in enumerate(toy.ENGLISH)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", toy.EOS)]
    )
    return made


if __name__ == "__main__":
    word_pieces().save(str(WEIGHTS / "text_encoder_tokenizer.json"), pretty=False)
    words().save(str(WEIGHTS / "translator_tokenizer.json"), pretty=False)
