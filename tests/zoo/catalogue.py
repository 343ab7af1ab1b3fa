"""Every model of the catalogue, with a factory for each attention implementation.

`attn-export inspect tests/zoo/catalogue.py:bert_eager` works on any of them: an entry's name, its
hyphens as underscores, and the implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tests.zoo.detection import DETECTION
from tests.zoo.entry import Entry, Made
from tests.zoo.multimodal import MULTIMODAL
from tests.zoo.text import TEXT
from tests.zoo.vision import VISION

CATALOGUE: dict[str, Entry] = {**VISION, **DETECTION, **TEXT, **MULTIMODAL}


def factory_name(name: str, attention: str) -> str:
    return f"{name.replace('-', '_')}_{attention}"


FACTORIES: dict[str, Callable[[], Made]] = {
    factory_name(name, attention): partial(entry.build, attention)
    for name, entry in CATALOGUE.items()
    for attention in entry.attentions
}

MODEL_TYPES = {
    factory_name(name, attention): entry.model_type
    for name, entry in CATALOGUE.items()
    for attention in entry.attentions
}


def __getattr__(name: str) -> Callable[[], Made]:
    try:
        return FACTORIES[name]
    except KeyError:
        raise AttributeError(name) from None
