"""With --json, stdout is one JSON document and nothing else, whatever happens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from attn_export.cli.main import COMMANDS
from attn_export.models.zoo import ZOO
from tests.boundary import Cli

PRINTING = """
import torch
from torch import nn

print("imported")

class Printing(nn.Module):
    def forward(self, x):
        print("forward")
        return x * 2

def build():
    print("building")
    return Printing(), torch.ones(2, 4)
"""

TUNED = {
    "bundle", "targets", "runtimes", "changed", "not_measured", "notes", "budget", "seconds",
    "machine", "versions",
}  # fmt: skip
PRINTED = [
    (["models"], {"models"}),
    (["inspect", "BUNDLE"],
     {"model", "sites", "total", "recognised", "lowered", "refused", "other", "rotary",
      "linear", "work"}),
    (["fuse", "BUNDLE/model.cpu.onnx", "-o", "fused.onnx"],
     {"model", "sites", "total", "recognised", "lowered", "refused", "other", "rotary", "linear",
      "work", "output", "notes", "verify"}),
    (["verify", "BUNDLE"],
     {"cases", "runtimes", "metric", "passed", "overridden", "unavailable", "against", "masked",
      "notes", "reference", "seed"}),
    (["bench", "BUNDLE", "--seconds", "0.2"],
     {"model", "component", "runtimes", "batches", "unavailable", "baseline", "case", "noisy",
      "busy", "machine", "versions"}),
    (["doctor", "--runtime", "ort-cpu"], {"runtimes", "passed", "machine", "versions"}),
    (["report", "BUNDLE"], {"report"}),
    (["export", "printing.py:build", "-o", "a"],
     {"bundle", "targets", "notes", "verify", "bench"}),
    (["run", "printing.py:build", "-o", "b", "--seconds", "0.2"],
     {"bundle", "targets", "notes", "verify", "bench"}),
    (["tune", "BUNDLE", "--budget", "1"], TUNED),
    (["predict", "BUNDLE", "digit.npy"], {"bundle", "runtime", "count", "results", "skipped"}),
    (["deploy", "triton", "BUNDLE", "-o", "repository"], {"repository", "models", "target"}),
    (["deploy", "kserve", "BUNDLE", "-o", "service.yaml", "--image", "digits:1"],
     {"file", "service"}),
    (["deploy", "docker", "BUNDLE", "-o", "image"], {"folder", "target", "not_pinned"}),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "keys"), PRINTED)
def test_each_command_prints_its_object_alone(
    cli: Cli, bundle_copy: Path, tmp_path: Path, arguments: list[str], keys: set[str]
) -> None:
    """Also where the user's own model prints."""
    (tmp_path / "printing.py").write_text(PRINTING)
    np.save(tmp_path / "digit.npy", np.zeros((1, 8, 8), np.float32))
    given = [argument.replace("BUNDLE", str(bundle_copy)) for argument in arguments]
    ended = cli(*given, "--json")
    assert ended.code == 0, ended.stderr
    assert set(ended.json) == keys


def test_no_command_was_left_out() -> None:
    """`serve` prints its object and goes on; tests/serve read it."""
    assert {arguments[0] for arguments, _ in PRINTED} | {"serve"} == set(COMMANDS)


@pytest.mark.parametrize("command", [["verify"], ["bench", "--seconds", "0.2"]])
def test_a_check_that_says_no_prints_its_result_once(
    cli: Cli, wrong_bundle: Path, command: list[str]
) -> None:
    ended = cli(*command, wrong_bundle, "--json")
    assert ended.code == 1
    assert "runtimes" in ended.json
    assert "Error: ort-cpu " in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["verify", "nowhere"], 5),
        (["verify"], 2),
        (["run", "vit-digit"], 2),
        (["inspect", "no"], 2),
    ],
)
def test_an_error_is_an_object_with_its_sentence_and_code(
    cli: Cli, arguments: list[str], code: int
) -> None:
    ended = cli(*arguments, "--json")
    assert ended.code == code
    assert ended.json == {"error": ended.sentence, "exit_code": code}


def test_a_site_has_the_documented_fields(cli: Cli, digits_bundle: Path) -> None:
    account = cli("inspect", digits_bundle, "--json").json
    assert [site["name"] for site in account["sites"]] == [f"blocks.{i}.attn" for i in range(6)]
    assert account["sites"][0] == {
        "name": "blocks.0.attn", "kind": "self", "heads": 4, "kv_heads": 4, "head_size": 16,
        "v_head_size": 16, "query_tokens": 17, "key_tokens": 17, "mask": "none", "causal": "none",
        "window": None, "scale": 0.25, "softcap": 0.0, "blocked_rows": "same",
        "lowering": "com.microsoft.Attention", "status": "lowered", "reason": "", "code": None,
        "proved": "run",
        "example_tokens": [17, 17], "query_key_pairs": 289,
    }  # fmt: skip


def test_an_output_of_verify_has_the_documented_fields(cli: Cli, digits_bundle: Path) -> None:
    shown = cli("verify", digits_bundle, "--json").json
    assert shown["cases"] == ["batch=1", "batch=3", "batch=2"]
    row = shown["runtimes"]["ort-cpu"]["outputs"]["logits"]
    assert {"max_abs", "max_rel", "mean_abs", "cosine", "error_vs_truth", "torch_error_vs_truth",
            "allowed", "passed"} <= row.keys()  # fmt: skip
    assert row["max_abs"] <= row["allowed"]


def test_the_list_of_models_tells_their_size(cli: Cli) -> None:
    listed = {row["name"]: row for row in cli("models", "--json").json["models"]}
    assert listed.keys() == ZOO.keys()
    assert listed["vit-digits"]["parameters"] == 302_154
