"""The table as a page: docs/capability.md holds what `page` returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from attn_export.capability.form import Version
from attn_export.capability.kernels import KERNELS, RUNTIMES
from attn_export.capability.limits import LIMITS, REQUIREMENTS
from attn_export.capability.measured import rows, sources
from attn_export.capability.preference import FAST_KERNELS, PREFERENCES
from attn_export.capability.rows import BLOCKED_ROWS
from attn_export.capability.targets import TARGETS

HEAD = """# What each attention op may do on each runtime

This page is made from `attn_export/capability/`; a test checks that it is up to date. Each row says
where it is known from. What is said of ONNX Runtime's CPU provider, and of the same kernels in
WebAssembly (`ort-web`), is run by `tests/capability/test_facts.py`, what is said of OpenVINO by
`test_openvino_facts.py` where that is installed; the rest was read. Nothing is said of a browser's
WebGPU. Rewrites are proved on the CPU provider alone: for any other runtime that is a `stand-in`.

An op that is not listed under Kernels has none on that runtime. Products, softmax and sums run
everywhere: that form is called `decomposed`.
"""


MEASURED = """Before that order comes what was clearly faster at the nearest of the sizes below,
within half and twice of a site's: one self-attention with its projections, batch 1, float32.
Another machine differs, so measure there: [tune](tune.md).
"""


def page() -> str:
    """Markdown, with one table a question."""
    return "\n".join([
        HEAD,
        _table("Targets", ("target", "runtime", "version assumed if not installed"),
               ([t.name, t.runtime, f"{RUNTIMES[t.runtime]} {t.pinned}"]
                for t in TARGETS.values())),
        _table("Kernels", ("op", "runtime", "from", "dtypes", "source"),
               ([k.op, k.runtime, f"{RUNTIMES[k.runtime]} {_number(k.since)}", ", ".join(k.dtypes),
                 k.source] for k in KERNELS)),
        _table("Refused", ("op", "on", "when", "because it", "code", "source"),
               ([x.op, _runtimes(x.runtimes), _conditions(x.when, x.since, x.before), x.words,
                 x.code, x.source] for x in LIMITS)),
        _table("Required", ("op", "on", "what the node needs", "source"),
               ([r.op, _runtimes(r.runtimes), r.words, r.source] for r in REQUIREMENTS)),
        _table("A query whose mask allows no key",
               ("op", "runtime", "row of", "versions", "answer", "source"),
               ([r.op, r.runtime, r.blocked, _versions(r.since, r.before) or "all", r.answer,
                 r.source] for r in BLOCKED_ROWS)),
        "PyTorch gives zero for bool and -inf, the mean of the values for the lowest number.\n",
        _table("Tried in this order", ("runtime", "when", "ops", "because", "source"),
               ([p.runtime, _conditions(p.when), ", ".join(p.ops), p.why, p.source]
                for p in PREFERENCES)),
        MEASURED,
        *(f"- {runtime}: {source}" for runtime, source in sources().items()),
        "",
        _table("Measured", ("runtime", "mask", "heads", "tokens", "milliseconds, fastest first"),
               ([r["runtime"], r["mask"], f"{r['heads']} of {r['head_size']}", str(r["tokens"]),
                 _times(r["ms"])] for r in rows())),
        _table("Fast kernels of CUDA", ("kernel", "ops", "dtypes", "not with", "source"),
               ([k.name, ", ".join(k.ops), ", ".join(k.dtypes), ", ".join(k.blockers), k.source]
                for k in FAST_KERNELS)),
    ])  # fmt: skip


def _times(ms: Mapping[str, float]) -> str:
    return ", ".join(f"{op} {ms[op]:.3g}" for op in sorted(ms, key=ms.__getitem__))


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"## {title}", "", _line(columns), _line(["---"] * len(columns))]
    return "\n".join([*lines, *map(_line, rows), ""])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _runtimes(names: Sequence[str]) -> str:
    return "everywhere" if set(names) == set(RUNTIMES) else ", ".join(names)


def _conditions(when: Sequence[str], since: Version = (0,), before: Version | None = None) -> str:
    return "; ".join([*when, _versions(since, before)]).strip("; ") or "always"


def _versions(since: Version, before: Version | None) -> str:
    words = [f"from {_number(since)} on"] if since > (0,) else []
    words += [f"before {_number(before)}"] if before is not None else []
    return ", ".join(words)


def _number(version: Version) -> str:
    return ".".join(map(str, version))
