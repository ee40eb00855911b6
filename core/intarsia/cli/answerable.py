"""Naming the part of a plugin that fails while a command runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

from intarsia.errors import ExecutionError, IntarsiaError
from intarsia.plugins import Offer
from intarsia.saying import said

#: What the command line tells in its own words, and what is the machine's: no fault of whoever ran into it.
_TOLD = (IntarsiaError, click.ClickException, click.exceptions.Exit, click.Abort, OSError, MemoryError)


@contextmanager
def answerable(offer: Offer, doing: str) -> Iterator[None]:
    """Turn what a part's code raises in the block into an ExecutionError that names it."""
    try:
        yield
    except _TOLD:
        raise
    except Exception as error:
        raised = ExecutionError(f"{offer.title} failed in {doing}: {said(error)}")
        raised.owner = offer.title
        raise raised from error
