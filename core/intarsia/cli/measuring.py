"""What commands share that run a model over a text: which model, and which text."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from attrs import evolve

from intarsia.cli.options import config_options
from intarsia.types import EngineConfig

T = TypeVar("T")


def model_options(command: Callable[..., T]) -> Callable[..., T]:
    """Add MODEL, -m, -c and -o to a command, which receives `config`."""

    @click.argument("reference", metavar="[MODEL]", required=False)
    @config_options
    @functools.wraps(command)
    def call(*, reference: str | None, config: EngineConfig, **rest: Any) -> T:
        if reference is not None:
            if click.get_current_context().params.get("model") is not None:
                raise click.UsageError("MODEL and -m are both given; one is the model")
            config = evolve(config, model=evolve(config.model, use=reference))
        return command(config=config, **rest)

    return call


def text_option(default: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Add --text to a command, which receives `text_file`."""
    return click.option(
        "--text",
        "text_file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help=f"What the model reads, in UTF-8. [default: {default}]",
    )
