"""What all subcommands do with the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from intarsia.cli.loading import loading
from intarsia.cli.terminal import show, write

if TYPE_CHECKING:
    from rich.console import RenderableType

    from intarsia.protocols import Progress


@contextlib.contextmanager
def quietly() -> Iterator[Progress]:
    """Show progress on a terminal, and keep what plugins print out of the answer."""
    with loading() as progress, contextlib.redirect_stdout(sys.stderr):
        yield progress


def show_all(*tables: RenderableType | Any) -> None:
    """Show tables one below the other."""
    for one in tables:
        show(one)
        write("\n")
