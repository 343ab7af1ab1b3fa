"""From a module to an ONNX graph."""

from __future__ import annotations

import logging
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_export.errors import ExportError
from attn_export.exporting.exporter import to_onnx
from attn_export.models.spec import Axis, ExportSpec

BATCH, TOKENS = Axis("batch", 1, 8), Axis("tokens", 1, 32)


class Attend(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


def shape(value: ir.Value) -> list[int | str]:
    assert value.shape is not None
    return [size if isinstance(size, int) else str(size.value) for size in value.shape]


def test_dynamic_sizes_carry_the_declared_names() -> None:
    spec = ExportSpec(Attend(), {"x": torch.randn(2, 3, 5, 8)}, {"x": {0: BATCH, 2: TOKENS}})
    graph = to_onnx(spec).model.graph
    assert shape(graph.inputs[0]) == ["batch", 3, "tokens", 8]
    assert shape(graph.outputs[0]) == ["batch", 3, "tokens", 8]


@pytest.mark.parametrize("size", [1, 2])
def test_an_example_of_one_row_still_gives_a_dynamic_batch(size: int) -> None:
    spec = ExportSpec(Attend(), {"x": torch.randn(size, 3, size, 8)}, {"x": {0: BATCH, 2: TOKENS}})
    assert shape(to_onnx(spec).model.graph.inputs[0]) == ["batch", 3, "tokens", 8]


class Freezes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(int(x.shape[0]) // 2, 2, -1).sum(1) if x.shape[0] == 4 else x


def test_a_declared_axis_that_freezes_is_an_error() -> None:
    spec = ExportSpec(Freezes(), {"x": torch.randn(4, 3)}, {"x": {0: BATCH}})
    with pytest.raises(ExportError, match="batch"):
        to_onnx(spec)


def test_a_batch_that_nobody_declared_may_freeze_and_is_said() -> None:
    graph = to_onnx(ExportSpec(Freezes(), {"x": torch.randn(4, 3)}))
    assert shape(graph.model.graph.inputs[0]) == [4, 3]
    assert graph.spec.dynamic == {}
    assert "the batch is fixed at 4" in graph.notes[0]


class Dropout(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=self.p)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class FunctionalDropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)  # its training flag is on unless it is handed down


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


@pytest.mark.parametrize(("module", "way_out"), [
    (Dropout(0.5), "pass dropout_p=p if self.training else 0.0"),
    (FunctionalDropout(), "pass training=self.training"),
    (Noise(), "hand its numbers in as an input"),
])  # fmt: skip
def test_randomness_that_stays_on_in_eval_is_refused_by_module_name(
    module: nn.Module, way_out: str
) -> None:
    spec = ExportSpec(Outer(module).eval(), {"x": torch.randn(2, 3, 4, 8)})
    seen = rf"in {type(module).__name__} \(inner\) stays random in eval mode; "
    with pytest.raises(ExportError, match=seen + way_out):
        to_onnx(spec)


@pytest.mark.parametrize("module", [Dropout(0.0), nn.Dropout(0.5)])
def test_dropout_that_is_off_is_no_obstacle(module: nn.Module) -> None:
    graph = to_onnx(ExportSpec(Outer(module).eval(), {"x": torch.randn(2, 3, 4, 8)}))
    assert "RandomNormalLike" not in {node.op_type for node in graph.model.graph}


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_transformer_encoder_layers_export_in_spite_of_their_fast_path(
    norm_first: bool, grad: type
) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=norm_first).eval()
    with grad():
        graph = to_onnx(ExportSpec(layer, {"src": torch.randn(2, 5, 16)}))
    assert "Attention" in {node.op_type for node in graph.model.graph}
    assert torch.backends.mha.get_fastpath_enabled()


def test_global_state_is_restored_after_an_exception() -> None:
    logger = logging.getLogger("torch.onnx")
    before = logger.level, torch.is_grad_enabled()
    with pytest.raises(ExportError):
        to_onnx(ExportSpec(Noise(), {"x": torch.randn(2, 3)}))
    assert torch.backends.mha.get_fastpath_enabled()
    assert (logger.level, torch.is_grad_enabled()) == before


class Several(nn.Module):
    def forward(self, x: Tensor) -> dict[str, object]:
        return {"twice": 2 * x, "parts": (x + 1, x), "none": None}


def test_outputs_are_named_after_where_they_stand() -> None:
    graph = to_onnx(ExportSpec(Several(), {"x": torch.randn(2, 3)}))
    assert [v.name for v in graph.model.graph.outputs] == ["twice", "parts_0", "parts_1"]


def test_an_output_called_as_an_input_gets_a_name_of_its_own() -> None:
    class Same(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"x": x + 1}

    graph = to_onnx(ExportSpec(Same(), {"x": torch.randn(2, 3)}))
    assert [value.name for value in graph.model.graph.outputs] == ["x_out"]


def test_inputs_may_be_renamed_where_python_has_no_such_name() -> None:
    spec = ExportSpec(
        Attend(), {"x": torch.randn(2, 3, 5, 8)}, {"x": {0: BATCH}}, names={"x": "past.0.key"}
    )
    value = to_onnx(spec).model.graph.inputs[0]
    assert (value.name, shape(value)[0]) == ("past.0.key", "batch")


def test_a_model_that_raises_on_its_example_says_what_it_raised() -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("the image is too small")

    with pytest.raises(ExportError, match="raised ValueError on its example inputs: the image is"):
        to_onnx(ExportSpec(Raises(), {"x": torch.randn(2, 3)}))


def test_no_path_of_this_machine_is_left_in_the_graph() -> None:
    graph = to_onnx(ExportSpec(Outer(Attend()), {"x": torch.randn(2, 3, 5, 8)}))
    raw = ir.to_proto(graph.model).SerializeToString()
    assert str(Path(__file__).parent).encode() not in raw
    assert b"test_exporter.py:" in raw


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads_follow_each_other(kv_heads: int) -> None:
    """Value heads are filled with 1, 2: query heads 0..3 must see 1, 1, 2, 2 and not 1, 2, 1, 2."""
    from tests.attention.graphs import run

    class Grouped(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    q, k = torch.randn(1, 4, 5, 16), torch.randn(1, kv_heads, 5, 16)
    v = torch.arange(1.0, kv_heads + 1).view(1, -1, 1, 1).expand(1, kv_heads, 5, 16).contiguous()
    graph = to_onnx(ExportSpec(Grouped(), {"q": q, "k": k, "v": v}, {}, ("y",)))
    result = run(graph.model, q=torch.cat([q, q]), k=torch.cat([k, k]), v=torch.cat([v, v]))
    expected = [1, 1, 2, 2] if kv_heads == 2 else [1, 1, 1, 1]
    assert result[0, :, 0, 0].round(4).tolist() == expected


def test_a_length_that_forward_treats_apart_names_the_range_that_works() -> None:
    """A causal buffer of 16 places is cut to the length: at 16 itself nothing is cut."""

    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tril = nn.Buffer(torch.ones(16, 16).tril())

        def forward(self, x: Tensor) -> Tensor:
            T = x.shape[1]
            return (x @ x.mT).masked_fill(self.tril[:T, :T] == 0, -1e9).softmax(-1) @ x

    x = torch.randn(2, 5, 8)
    with pytest.raises(ExportError, match="declare that axis up to 15"):
        to_onnx(ExportSpec(Buffered(), {"x": x}, {"x": {1: Axis("tokens", 1, 16)}}))
    assert to_onnx(ExportSpec(Buffered(), {"x": x}, {"x": {1: Axis("tokens", 1, 15)}})).notes == []


def test_half_precision_models_are_refused_by_name() -> None:
    spec = ExportSpec(nn.Linear(4, 4).half(), {"input": torch.randn(2, 4).half()})
    with pytest.raises(ExportError, match=r"torch\.float16, only float32 is built yet"):
        to_onnx(spec)
