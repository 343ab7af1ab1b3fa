"""A small English-French grammar, big enough for word order and agreement to matter.

French puts colours behind the noun and sizes before it, and both agree with it: `the black cats`
is `les chats noirs`, `the big black car` is `la grande voiture noire`. A translator therefore
has to look back and forth over the source, which is what attention is for.

Some adjective-noun pairs, `black cat` among them, never occur in training sentences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PAD, BOS, EOS = 0, 1, 2
MAX_TARGET = 12
"""No translation is longer than this, its end token included."""


@dataclass(frozen=True)
class Word:
    """English singular and plural; French as masculine, feminine and their plurals ("": none)."""

    singular: str
    plural: str
    french: tuple[str, str, str, str]


@dataclass(frozen=True)
class Noun:
    singular: str
    plural: str
    french: tuple[str, str]
    feminine: bool


DETERMINERS = (
    Word("the", "the", ("le", "la", "les", "les")),
    Word("a", "", ("un", "une", "", "")),
    Word("this", "these", ("ce", "cette", "ces", "ces")),
    Word("my", "my", ("mon", "ma", "mes", "mes")),
    Word("your", "your", ("ton", "ta", "tes", "tes")),
)
ADJECTIVES_AFTER = (
    Word("black", "black", ("noir", "noire", "noirs", "noires")),
    Word("white", "white", ("blanc", "blanche", "blancs", "blanches")),
    Word("green", "green", ("vert", "verte", "verts", "vertes")),
    Word("blue", "blue", ("bleu", "bleue", "bleus", "bleues")),
    Word("red", "red", ("rouge", "rouge", "rouges", "rouges")),
    Word("round", "round", ("rond", "ronde", "ronds", "rondes")),
)
ADJECTIVES_BEFORE = (
    Word("big", "big", ("grand", "grande", "grands", "grandes")),
    Word("small", "small", ("petit", "petite", "petits", "petites")),
    Word("pretty", "pretty", ("joli", "jolie", "jolis", "jolies")),
    Word("new", "new", ("nouveau", "nouvelle", "nouveaux", "nouvelles")),
    Word("old", "old", ("vieux", "vieille", "vieux", "vieilles")),
)
ADJECTIVES = ADJECTIVES_AFTER + ADJECTIVES_BEFORE
NOUNS = (
    Noun("cat", "cats", ("chat", "chats"), False),
    Noun("house", "houses", ("maison", "maisons"), True),
    Noun("dog", "dogs", ("chien", "chiens"), False),
    Noun("car", "cars", ("voiture", "voitures"), True),
    Noun("book", "books", ("livre", "livres"), False),
    Noun("table", "tables", ("table", "tables"), True),
    Noun("horse", "horses", ("cheval", "chevaux"), False),
    Noun("flower", "flowers", ("fleur", "fleurs"), True),
    Noun("hat", "hats", ("chapeau", "chapeaux"), False),
    Noun("chair", "chairs", ("chaise", "chaises"), True),
    Noun("garden", "gardens", ("jardin", "jardins"), False),
    Noun("dress", "dresses", ("robe", "robes"), True),
    Noun("boat", "boats", ("bateau", "bateaux"), False),
    Noun("mouse", "mice", ("souris", "souris"), True),
)
VERBS = (
    Word("sees", "see", ("voit", "voit", "voient", "voient")),
    Word("follows", "follow", ("suit", "suit", "suivent", "suivent")),
    Word("hides", "hide", ("cache", "cache", "cachent", "cachent")),
    Word("touches", "touch", ("touche", "touche", "touchent", "touchent")),
    Word("finds", "find", ("trouve", "trouve", "trouvent", "trouvent")),
)
BE = Word("is", "are", ("est", "est", "sont", "sont"))


def _vocabulary(words: Iterator[str]) -> tuple[str, ...]:
    return ("<pad>", "<bos>", "<eos>", *sorted(set(words) - {""}))


_INFLECTED = (*DETERMINERS, *ADJECTIVES, *VERBS, BE)
ENGLISH = _vocabulary(w for x in (*_INFLECTED, *NOUNS) for w in (x.singular, x.plural))
FRENCH = _vocabulary(w for x in (*_INFLECTED, *NOUNS) for w in x.french)


def held_out(adjective: Word, noun: Noun) -> bool:
    """Whether training sentences never say this of that (one pair in seven)."""
    return (ADJECTIVES.index(adjective) + NOUNS.index(noun)) % 7 == 0


@dataclass(frozen=True)
class Pair:
    """A sentence in both languages. `held_out`: it has a pair that training never shows."""

    english: str
    french: str
    held_out: bool


class Grammar:
    """Draws sentences: a noun phrase, `X is black`, or `X sees Y`.

    Raises nothing; the same generator state gives the same sentences.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def _below(self, n: int) -> int:
        return int(torch.randint(n, (), generator=self.generator))

    def _phrase(self) -> tuple[list[str], list[str], Noun, int, bool]:
        """English, French, their noun, its form (0 to 3) and whether a pair is held out."""
        plural = self._below(2)
        choices = [d for d in DETERMINERS if d.plural or not plural]
        determiner, noun = choices[self._below(len(choices))], NOUNS[self._below(len(NOUNS))]
        form = 2 * plural + noun.feminine
        before = [ADJECTIVES_BEFORE[self._below(len(ADJECTIVES_BEFORE))]] * (self._below(3) == 0)
        after = [ADJECTIVES_AFTER[self._below(len(ADJECTIVES_AFTER))]] * (self._below(2) == 0)
        spoken = determiner.plural if plural else determiner.singular
        english = [spoken, *(a.singular for a in before + after)]
        english.append(noun.plural if plural else noun.singular)
        french = [determiner.french[form], *(a.french[form] for a in before), noun.french[plural]]
        french += [a.french[form] for a in after]
        return english, french, noun, form, any(held_out(a, noun) for a in before + after)

    def sentence(self) -> Pair:
        english, french, noun, form, unseen = self._phrase()
        shape, plural = self._below(4), form // 2
        if shape == 1:
            adjective = ADJECTIVES[self._below(len(ADJECTIVES))]
            english += [BE.plural if plural else BE.singular, adjective.singular]
            french += [BE.french[form], adjective.french[form]]
            unseen |= held_out(adjective, noun)
        elif shape > 1:
            verb = VERBS[self._below(len(VERBS))]
            object_english, object_french, _, _, object_unseen = self._phrase()
            english += [verb.plural if plural else verb.singular, *object_english]
            french += [verb.french[form], *object_french]
            unseen |= object_unseen
        return Pair(" ".join(english), " ".join(french), unseen)

    def pairs(self, count: int, held_out: bool) -> list[Pair]:
        """`count` pairs, all with or all without an unseen adjective-noun pair."""
        found: list[Pair] = []
        while len(found) < count:
            pair = self.sentence()
            if pair.held_out == held_out:
                found.append(pair)
        return found


def encode(sentences: Sequence[str], vocabulary: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Right-padded token ids with an end token, and their mask; both (B, S) int64.

    Raises ValueError for a word that the vocabulary lacks.
    """
    index = {word: i for i, word in enumerate(vocabulary)}
    unknown = {word for s in sentences for word in s.split() if word not in index}
    if unknown:
        raise ValueError(f"the vocabulary has no {sorted(unknown)}")
    rows = [torch.tensor([*(index[w] for w in s.split()), EOS]) for s in sentences]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    return ids, (ids != PAD).long()


def decode(ids: Tensor, vocabulary: tuple[str, ...]) -> list[str]:
    """Sentences up to the end token, from token ids (B, S)."""
    rows = (row[: row.index(EOS)] if EOS in row else row for row in ids.tolist())
    return [" ".join(vocabulary[i] for i in row) for row in rows]
