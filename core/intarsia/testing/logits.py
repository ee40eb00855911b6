"""Reading logits through a composed engine, and spoiling what it must not read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from intarsia.types import Row

if TYPE_CHECKING:
    import torch

    from intarsia.engine import Engine

_ID = ("prompt_logits", 0)


def prompt_logits(engine: Engine, token_ids: Sequence[int], *, chunk: int | None = None) -> torch.Tensor:
    """Return the fp32 logits (T, V) of every position of a prompt.

    Args:
        engine: with a local executor.
        token_ids: the prompt.
        chunk: tokens a step; None runs all at once.
    """
    import torch

    from intarsia.executor import LocalExecutor

    executor, cache = engine.parts.executor, engine.parts.cache
    assert isinstance(executor, LocalExecutor)
    pieces = []
    try:
        for start in range(0, len(token_ids), chunk or len(token_ids)):
            ids = tuple(token_ids[start : start + (chunk or len(token_ids))])
            found = cache.reserve(_ID, token_ids, start + len(ids))
            assert found is not None, "the cache has no room"
            row = Row(sequence_id=_ID, token_ids=ids, start=start, pages=cache.pages(_ID))
            pieces.append(executor.all_logits(row))
    finally:
        cache.release(_ID)
    return torch.cat(pieces)


def poison_cache(engine: Engine) -> None:
    """Fill the whole cache with NaN: whatever reads a slot that holds no token shows it."""
    from intarsia.executor import LocalExecutor

    executor = engine.parts.executor
    assert isinstance(executor, LocalExecutor)
    executor.poison()
