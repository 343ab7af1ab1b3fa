"""What the owner of a model should know of its attention, right as the export may be."""

from __future__ import annotations

from attn_export.attention.site import Account


def causal_notes(account: Account) -> list[str]:
    """Sites that are causal from the upper left although queries and keys may differ in number.

    With a cache, `is_causal=True` of scaled_dot_product_attention lets the newest query see the
    oldest keys alone. The export keeps that, since it is what the model computes.
    """
    names = [
        outcome.site.name
        for outcome in account.outcomes
        if outcome.site.causal == "upper-left"
        and outcome.site.query_tokens != outcome.site.key_tokens
    ]
    if not names:
        return []
    return [
        f"{', '.join(names)} is causal from the upper left with numbers of queries and keys that"
        " differ: the first query sees the first key alone, also behind a cache; if the last query"
        " should see all keys, give scaled_dot_product_attention a mask instead of is_causal"
    ]
