"""Options that commands share: which engine, and how tokens are chosen."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from attrs import evolve

from intarsia.config import load_config
from intarsia.types import EngineConfig, SamplingParams

T = TypeVar("T")

#: Digits of a number that is still worth reading; an id has far fewer.
_MAX_DIGITS = 18
_MAX_SHOWN = 40


def config_options(command: Callable[..., T]) -> Callable[..., T]:
    """Add -m, -c and -o to a command, which receives `config`."""

    @click.option(
        "-m", "--model", metavar="REF", help="A name (smollm2), a .gguf file, a Hugging Face folder, a hub id."
    )
    @plugin_options
    @functools.wraps(command)
    def call(*, model: str | None, config: EngineConfig, **rest: Any) -> T:
        if model is not None:
            config = evolve(config, model=evolve(config.model, use=model))
        return command(config=config, **rest)

    return call


def plugin_options(command: Callable[..., T]) -> Callable[..., T]:
    """Add -c and -o to a command, which receives `config`."""

    @click.option("-c", "--config", "file", metavar="FILE", type=click.Path(path_type=Path), help="An engine.toml.")
    @click.option(
        "-o",
        "--override",
        "overrides",
        metavar="PATH=VALUE",
        multiple=True,
        help="Set one value of the config, such as cache.page_size=32. Repeatable.",
    )
    @functools.wraps(command)
    def call(*, file: Path | None, overrides: tuple[str, ...], **rest: Any) -> T:
        return command(config=load_config(file, overrides), **rest)

    return call


def sampling_options(
    *, max_tokens: int | None = None, temperature: float = 1.0
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Add the options that choose tokens and end an answer to a command, which receives `params`; with its defaults."""
    most = "all that fit" if max_tokens is None else str(max_tokens)

    def decorate(command: Callable[..., T]) -> Callable[..., T]:
        @click.option(
            "--max-tokens",
            type=int,
            default=max_tokens,
            metavar="N",
            help=f"Tokens to generate at most. [default: {most}]",
        )
        @click.option(
            "--temperature",
            type=float,
            default=temperature,
            metavar="T",
            help=f"Divides the logits; 0 is greedy. [default: {temperature:g}]",
        )
        @click.option(
            "--top-k", type=int, default=0, metavar="K", help="Keep the K likeliest tokens; 0 keeps all. [default: 0]"
        )
        @click.option(
            "--top-p", type=float, default=1.0, metavar="P", help="Keep the likeliest of probability P. [default: 1]"
        )
        @click.option("--seed", type=int, metavar="N", help="Repeat an answer. [default: from the operating system]")
        @click.option("--stop", multiple=True, metavar="TEXT", help="End before this text. Repeatable.")
        @functools.wraps(command)
        def call(
            *,
            max_tokens: int | None,
            temperature: float,
            top_k: int,
            top_p: float,
            seed: int | None,
            stop: tuple[str, ...],
            **rest: Any,
        ) -> T:
            params = SamplingParams(
                max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=stop
            )
            return command(params=params, **rest)

        return call

    return decorate


def read_token_ids(_: click.Context, __: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """Read `1,2,3`; whether the vocabulary has these ids is for the engine to say."""
    if text is None:
        return None
    ids = [item.strip() for item in text.split(",")]
    for item in ids:
        if not re.fullmatch(rf"-?[0-9]{{1,{_MAX_DIGITS}}}", item):
            shown = repr(item if len(item) <= _MAX_SHOWN else f"{item[:_MAX_SHOWN]}...")
            raise click.BadParameter(
                f"{shown} is not a token id; give whole numbers with commas between, such as 1,2,3"
            )
    return tuple(int(item) for item in ids)
