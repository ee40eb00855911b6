"""Attention outside of its contract: what `intarsia.testing` lays out and compares, in the words of these tests."""

import torch
from attrs import evolve

from intarsia.testing.attention_rows import AttentionRow, check_row, name_of
from intarsia.testing.attention_rows import attention_of as attention_spec
from intarsia.testing.attention_step import Placement
from intarsia.testing.attention_step import attend as attend_placed

__all__ = ["AttentionRow", "as_int8", "attend", "attention_spec", "check"]


def as_int8(row):
    """Return a row whose keys and values are what its int8 entries stand for, in float64."""
    return row.stored("int8")


def attend(
    part, spec, rows, *, order="PSKD", page_size=16, scatter=None, cache_dtype=None, device="cpu", **prepared
) -> list[torch.Tensor]:
    """Run rows as one batch on a device; what else is given replaces fields of what the part prepares."""
    entry = "" if cache_dtype is None else name_of(cache_dtype)
    placed = Placement(order=order, page_size=page_size, scatter=scatter, entry=entry)
    ready = (lambda one: evolve(one, **prepared)) if prepared else None
    return attend_placed(part, spec, rows, placed, device=device, ready=ready)


def check(outs, rows, spec):
    """Compare with float64 over what rows hold."""
    for out, row in zip(outs, rows, strict=True):
        check_row(out, row, spec)
