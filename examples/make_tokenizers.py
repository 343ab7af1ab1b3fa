"""Makes the tokenizers of `text-encoder` and the translators: `python examples/make_tokenizers.py`.

The text encoder's is a WordPiece as BERT has it, with common words, word ends and all letters; its
weights are random, so that any will do. The translators' has the words of the toy grammar alone.
"""

from __future__ import annotations

import string
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from attn_export.models import toy_french as toy
from attn_export.models.text_encoder import TextEncoderConfig

WEIGHTS = Path(__file__).parent.parent / "attn_export" / "models" / "weights"


SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LETTERS = string.ascii_lowercase + string.digits
ENDS = "s ed ing er est ly ion ment ness able ful less al ive ity ous"
WORDS = (
    "the of and to a in is it that he was for on are as with they be at one have this from or "
    "had by not but what all were when we there can an your which their said if do will each "
    "about how up out them then she many some so these would other into has more her two like "
    "him see time could no make than first been its who now people my made over did down only "
    "way find use may water long little very after word call just where most know good bad "
    "new old great small big attention query key value head token model graph image text "
    "window mask export run time"
)


def word_pieces() -> Tokenizer:
    """Lower-cased, `[CLS] text [SEP]`, with [PAD] as token 0."""
    parts = [f"##{part}" for part in (*LETTERS, *ENDS.split())]
    pieces = dict.fromkeys([*SPECIAL, *LETTERS, *string.punctuation, *parts, *WORDS.split()])
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    assert len(vocabulary) <= TextEncoderConfig().vocab
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
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
