"""The command line introduces itself, and answers a wrong word with the way out."""

from __future__ import annotations

import re
import subprocess
from importlib import metadata

import pytest

from attn_export.cli.main import COMMANDS
from tests.boundary import SCRIPT, Cli

DEPLOY = ("deploy docker", "deploy kserve", "deploy triton")


@pytest.mark.parametrize("command", sorted({*COMMANDS, *DEPLOY} - {"deploy"}))
def test_each_command_has_help_with_the_shared_options(cli: Cli, command: str) -> None:
    ended = cli(*command.split(), "--help")
    assert (ended.code, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"Usage: attn-export {command} [OPTIONS]")
    for option in ("--json", "-q, --quiet", "-v, --verbose", "-h, --help"):
        assert option in ended.stdout


def test_a_group_lists_its_commands(cli: Cli) -> None:
    ended = cli("deploy", "--help")
    assert (ended.code, ended.stderr) == (0, "")
    listed = re.findall(r"^  ([a-z]+)  ", ended.stdout, re.MULTILINE)
    assert tuple(f"deploy {name}" for name in listed) == DEPLOY


def test_the_commands_and_exit_codes_are_listed(cli: Cli) -> None:
    ended = cli("--help")
    listed = re.findall(r"^  ([a-z]+)  ", ended.stdout, re.MULTILINE)
    assert listed == sorted(COMMANDS)
    assert "0 good, 1 a check says no, 2 usage, 3 a runtime is not available" in ended.stdout


def test_the_version_is_the_installed_one(cli: Cli) -> None:
    assert cli("--version").stdout == f"attn-export, version {metadata.version('attn-export')}\n"


def test_no_command_shows_the_help_and_exits_2(cli: Cli) -> None:
    ended = cli()
    assert (ended.code, ended.stdout) == (2, "")
    assert ended.stderr.startswith("Usage: attn-export [OPTIONS] COMMAND")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["exprot"], "No such command 'exprot'"),
        (["models", "--jsno"], "No such option '--jsno'. Did you mean '--json'?"),
        (["verify"], "Missing argument 'MODEL'"),
        (["export", "vit-digits"], "Missing option '-o'"),
        (["models", "extra"], "Got unexpected extra argument"),
        (["verify", "b", "--rtol", "much"], "'much' is not a valid float"),
        (["export", "vit-digits", "-o", "b", "--lowering", "best"], "'best' is not one of"),
        (["bench", "b", "--seconds", "-1"], "-1.0 is not in the range"),
        (["bench", "b", "--seconds", "inf"], "inf is not in the range"),
        (["bench", "b", "--margin", "-1"], "-1.0 is not in the range"),
    ],
)
def test_a_wrong_word_is_one_sentence_and_2(cli: Cli, arguments: list[str], sentence: str) -> None:
    ended = cli(*arguments)
    assert (ended.code, ended.stdout) == (2, "")
    assert sentence in ended.sentence
    assert ended.sentence.endswith("--help`.")


def test_help_and_the_list_of_models_import_no_torch(cli: Cli) -> None:
    for arguments in (["run", "--help"], ["models"]):
        ended = cli(*arguments, env={"PYTHONPROFILEIMPORTTIME": "1"})
        imported = set(re.findall(r"\|\s+(\w+)$", ended.stderr, re.MULTILINE))
        assert "attn_export" in imported
        assert not imported & {"torch", "onnxruntime", "onnx_ir"}


def test_a_reader_that_stops_early_is_no_error_to_print() -> None:
    """As in `attn-export models | head -1`."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([SCRIPT, "models"], text=True, **pipes) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
