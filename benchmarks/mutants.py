"""How many graphs that were broken on purpose `verify` catches, and how many sound ones it passes.

    python -m benchmarks.mutants [--sound N]

Every mutant is compared with its PyTorch source at the default tolerance; each sound model is
exported, lowered, verified on its stored cases and again on cases of another seed. Exits 1 where a
mutant is missed or a sound model fails. Takes some minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from attn_export.errors import AttnExportError
from tests.parity.counting import CLEAN, HERE, caught, exported, passes
from tests.parity.mutants import MUTANTS


def count_mutants() -> list[str]:
    """Those that were missed."""
    missed = []
    for model in dict.fromkeys(mutant.model for mutant in MUTANTS):
        with tempfile.TemporaryDirectory() as folder:
            drawn = exported(model, Path(folder))
            mine = [mutant for mutant in MUTANTS if mutant.model == model]
            lost = [m.name for m in mine if not caught(drawn, m, Path(folder))]
        print(f"{model}: {len(mine) - len(lost)} of {len(mine)} mutants caught", flush=True)
        missed += [f"{model}: {name}" for name in lost]
    return missed


def count_sound(sources: tuple[str, ...]) -> list[str]:
    """Those that failed, with what failed."""
    failed = []
    for source in sources:
        name = source.removeprefix(f"{HERE}:")
        with tempfile.TemporaryDirectory() as folder:
            try:
                failures = passes(source, Path(folder))
            except AttnExportError as error:
                failures = [str(error)]
        print(f"{name}: {'FAILED' if failures else 'passed'}", flush=True)
        failed += [f"{name}: {failures[0]}"] if failures else []
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sound", type=int, default=len(CLEAN), help="how many sound models")
    sources = CLEAN[: parser.parse_args().sound]
    missed, failed = count_mutants(), count_sound(sources)
    print(f"Mutants caught: {len(MUTANTS) - len(missed)} of {len(MUTANTS)}")
    print(f"Sound models passed: {len(sources) - len(failed)} of {len(sources)}")
    for line in [*missed, *failed]:
        print(f"  {line}")
    return 1 if missed or failed else 0


if __name__ == "__main__":
    sys.exit(main())
