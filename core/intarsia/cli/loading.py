"""Making an engine for a command, with a progress bar where a person waits for it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from intarsia.cli.signals import Signals
from intarsia.cli.terminal import is_terminal
from intarsia.errors import ConfigError
from intarsia.types import EngineConfig

if TYPE_CHECKING:
    from intarsia.engine import Engine
    from intarsia.protocols import Progress


def check_model(config: EngineConfig) -> None:
    """Raise ConfigError where no model is named, before anything slow begins."""
    if not config.model.use:
        raise ConfigError(
            "model: none is named; give one, such as -m smollm2, -m path/to/model.gguf, or `model` in the -c file",
            field="model",
        )


@contextlib.contextmanager
def opened(config: EngineConfig, signals: Signals) -> Iterator[Engine]:
    """Compose an engine, load its weights, and close it at the end of the block."""
    check_model(config)
    # What plugins print is not a part of the answer.
    with loading() as progress, contextlib.redirect_stdout(sys.stderr):
        with signals.held():
            from intarsia.engine import Engine
        engine = Engine.from_config(config, progress=progress)
    with engine:
        yield engine


@contextlib.contextmanager
def loading() -> Iterator[Progress]:
    """Show a bar on stderr for as long as something loads; nothing at all where stderr is no terminal."""
    if not is_terminal(sys.stderr):
        yield _ignore
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        task = bar.add_task("starting", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield show


def _ignore(what: str, done: int, total: int) -> None:
    del what, done, total
