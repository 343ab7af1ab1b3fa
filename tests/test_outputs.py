"""What a model returned, as named tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_export.errors import ExportError
from attn_export.outputs import named_tensors

X, M = torch.ones(2, 3), torch.ones(2, 1)


def names(result: Any) -> list[str]:
    return [name for name, _ in named_tensors(result)]


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (X, ["output"]),
        ((X, M), ["output_0", "output_1"]),
        ({"logits": X, "aux": {"a-b": M}}, ["logits", "aux_a_b"]),
        ({"logits": X, "count": 3}, ["logits"]),
        ([X, [M, None]], ["output_0", "output_1_0"]),
        (None, []),
    ],
)
def test_outputs_are_named_by_where_they_stand(result: Any, expected: list[str]) -> None:
    assert names(result) == expected


def cache(*layers: tuple[Any, Any]) -> Any:
    return SimpleNamespace(layers=[SimpleNamespace(keys=k, values=v) for k, v in layers])


def test_a_cache_gives_keys_and_values_of_each_layer_that_holds_any() -> None:
    key, value = torch.zeros(1, 2, 3, 4), torch.ones(1, 2, 3, 4)
    found = named_tensors({"logits": X, "past_key_values": cache((None, None), (key, value))})
    assert [name for name, _ in found] == ["logits", "present.1.key", "present.1.value"]
    assert found[1][1] is key
    assert found[2][1] is value


def test_the_caches_of_an_encoder_decoder_are_told_apart() -> None:
    both = SimpleNamespace(self_attention_cache=cache((X, X)), cross_attention_cache=cache((M, M)))
    assert names((X, both)) == [
        "output_0",
        "present.0.decoder.key",
        "present.0.decoder.value",
        "present.0.encoder.key",
        "present.0.encoder.value",
    ]


def test_an_object_that_hides_its_tensors_is_refused_by_name() -> None:
    with pytest.raises(ExportError, match="returns a SimpleNamespace as state"):
        named_tensors({"logits": X, "state": SimpleNamespace(memory=M)})
