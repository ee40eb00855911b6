"""Parts that cannot work where ranks share a model, refused before weights load."""

from __future__ import annotations

from typing import Final

from intarsia.errors import CompositionError
from intarsia.protocols import Parts

#: Drafters that run layers of the target, which no rank has all of. Others that try are refused when they start.
_RUN_THE_TARGET: Final = ("layer_skip",)


def check_parts(parts: Parts) -> None:
    """Refuse a drafter that would run a model which is shared out.

    Raises:
        CompositionError: names the drafter and those that would do.
    """
    if parts.drafter is None or parts.selection("executor").provider.key != "parallel":
        return
    drafter = parts.selection("drafter").provider.key
    if drafter in _RUN_THE_TARGET:
        raise not_whole(f"drafter {drafter!r}")


def not_whole(drafter: str) -> CompositionError:
    """Return why such a drafter cannot work here."""
    return CompositionError(
        f"{drafter} runs layers of the target itself, which executor 'parallel' has shared out between ranks; take "
        "drafter 'ngram', 'suffix' or 'draft_model', or executor 'local'",
        field="drafter",
    )
