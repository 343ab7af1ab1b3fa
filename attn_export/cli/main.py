"""`attn-export`: the commands, loaded when used, and where errors become sentences."""

from __future__ import annotations

import importlib
import json
import signal
import sys
import traceback
from types import FrameType

import click

from attn_export.errors import AttnExportError, CheckFailed, FileError, one_line

COMMANDS = {
    "bench": "Time a bundle's runtimes against PyTorch, parity first.",
    "doctor": "Tell which runtimes work here, by running a small model on each.",
    "deploy": "Write what Triton, KServe or a container engine serves a bundle from.",
    "export": "Export a model into a bundle.",
    "fuse": "Fuse the attention of an .onnx file, and compare the whole graph with it.",
    "inspect": "List the attention sites of a model or bundle, and what they become.",
    "models": "List the models that have a name.",
    "predict": "Run a bundle over files: images, texts, arrays, rows.",
    "report": "Write a bundle's report as HTML.",
    "serve": "Serve bundles over REST and gRPC, verified and warm first.",
    "run": "Export, verify, benchmark and report in one go.",
    "tune": "Measure what a bundle's graphs could be here, and keep the fastest.",
    "verify": "Compare runtimes with the PyTorch outputs that a bundle carries.",
}
INTERRUPTED = 130
TERMINATED = 143


class Terminated(BaseException):
    """SIGTERM, as an exception, so that temporary files and worker processes go too."""


class LazyGroup(click.Group):
    """Imports a command's file when that command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"attn_export.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="attn-export")
def cli() -> None:
    """Export PyTorch models with attention to ONNX with fused ops, prove that the answers are
    PyTorch's, measure what is fastest, and ship a bundle that serves without PyTorch.

    \b
    Exit codes: 0 good, 1 a check says no, 2 usage, 3 a runtime is not available,
    4 export or lowering failed, 5 a file or bundle is bad.
    """


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with the documented code."""
    given = sys.argv[1:] if arguments is None else arguments
    signal.signal(signal.SIGTERM, _terminate)
    try:
        code = cli.main(args=given, prog_name="attn-export", standalone_mode=False)
    except click.exceptions.Exit as leaving:
        code = leaving.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        code = 2
    except click.UsageError as error:
        hint = f" See `{error.ctx.command_path} --help`." if error.ctx else ""
        code = _fail(given, f"{error.format_message().rstrip('.')}.{hint}", 2)
    except (KeyboardInterrupt, click.Abort):
        code = _fail(given, "Interrupted; nothing half-written was left.", INTERRUPTED)
    except Terminated:
        code = _fail(given, "Terminated; nothing half-written was left.", TERMINATED)
    except CheckFailed as error:  # raised by a command that has printed its result already
        code = _fail([], str(error), error.exit_code)
    except AttnExportError as error:
        code = _fail(given, str(error), error.exit_code)
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        code = _fail(given, f"{named}{error.strerror or one_line(error)}.", FileError.exit_code)
    except Exception as error:
        if "-v" in given or "--verbose" in given:
            traceback.print_exc()
        seen = f"attn-export failed on its own account, {type(error).__name__}: {one_line(error)}"
        fault = AttnExportError(seen, "run again with -v and report what it prints")
        code = _fail(given, str(fault), fault.exit_code)
    sys.exit(code or 0)


def _fail(arguments: list[str], sentence: str, code: int) -> int:
    if "--json" in arguments:
        click.echo(json.dumps({"error": sentence, "exit_code": code}))
    click.echo(f"Error: {sentence}", err=True)
    return code


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated
