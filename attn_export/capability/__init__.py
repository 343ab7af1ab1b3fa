"""What each attention op may do on each runtime: data with its source. Needs numpy alone.

`kernels` says which op exists where, `limits` where it is wrong or restricted, `rows` what it
answers for a query that may see no key, `preference` what is tried first; `query` asks them.
"""

from attn_export.capability.form import FEATURES, Form, Refusal, parse_version
from attn_export.capability.kernels import (
    CONTRIB_ATTENTION,
    CONTRIB_ROTARY,
    DECOMPOSED,
    GROUP_QUERY_ATTENTION,
    KERNELS,
    LINEAR_ATTENTION,
    MULTI_HEAD_ATTENTION,
    RUNTIMES,
    SPARSE_ATTENTION,
    STANDARD_ATTENTION,
    STANDARD_ROTARY,
)
from attn_export.capability.limits import LIMITS, REQUIREMENTS
from attn_export.capability.preference import (
    FOLDS_ROTARY,
    Preference,
    fast_kernels,
    preference,
)
from attn_export.capability.query import why_not
from attn_export.capability.rows import blocked_row
from attn_export.capability.targets import TARGET_RUNTIMES, TARGETS, Target

__all__ = [
    "CONTRIB_ATTENTION", "CONTRIB_ROTARY", "DECOMPOSED", "FEATURES", "FOLDS_ROTARY",
    "GROUP_QUERY_ATTENTION", "KERNELS", "LIMITS", "LINEAR_ATTENTION", "MULTI_HEAD_ATTENTION",
    "REQUIREMENTS", "RUNTIMES", "SPARSE_ATTENTION", "STANDARD_ATTENTION", "STANDARD_ROTARY",
    "TARGETS", "TARGET_RUNTIMES",
    "Form", "Preference", "Refusal", "Target", "blocked_row", "fast_kernels", "parse_version",
    "preference", "why_not",
]  # fmt: skip
