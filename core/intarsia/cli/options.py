"""Options that commands share: which engine, and how tokens are chosen."""

from __future__ import annotations

import functools
import json
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


#: Options that are fields of SamplingParams by the same name: name, type, metavar, help. None is left to the params.
_SAMPLING: tuple[tuple[str, type, str, str], ...] = (
    ("temperature", float, "T", "Divides the logits; 0 is greedy. [default: the model's, or {temperature}]"),
    ("top_k", int, "K", "Keep the K likeliest tokens; 0 keeps all. [default: the model's, or 0]"),
    ("top_p", float, "P", "Keep the likeliest of probability P. [default: the model's, or 1]"),
    ("min_p", float, "P", "Keep tokens at least P times as likely as the likeliest. [default: the model's, or 0]"),
    ("typical_p", float, "P", "Keep the most typical of probability P. [default: the model's, or 1]"),
    (
        "repetition_penalty",
        float,
        "R",
        "Divides logits of tokens that prompt or answer hold. [default: the model's, or 1]",
    ),
    ("presence_penalty", float, "X", "Taken off the logits of tokens that the answer holds. [default: 0]"),
    ("frequency_penalty", float, "X", "The same for each time that the answer holds them. [default: 0]"),
    ("min_tokens", int, "N", "Tokens before which nothing ends the answer. [default: 0]"),
    ("seed", int, "N", "Repeat an answer. [default: from the operating system]"),
)
#: Those that can be given several times: option, field, metavar, help.
_TEXTS = (
    ("--stop", "stop", "TEXT", "End before this text. Repeatable."),
    ("--banned-word", "banned_words", "TEXT", "A text that the answer never holds. Repeatable."),
)


def _read_processors(
    _context: click.Context, _option: click.Parameter, texts: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    """Read each KEY.OPTION=VALUE; a value that is no JSON is a text, so that a regex needs no quotes of its own."""
    made: dict[str, dict[str, Any]] = {}
    for text in texts:
        path, equals, value = text.partition("=")
        key, dot, option = path.partition(".")
        if not (equals and key and dot and option):
            shown = repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")
            raise click.BadParameter(f"{shown} is not KEY.OPTION=VALUE, such as structured_output.regex=[a-z]+")
        if option in made.setdefault(key, {}):
            raise click.BadParameter(f"{path} is given twice")
        try:
            made[key][option] = json.loads(value)
        except (ValueError, RecursionError):
            made[key][option] = value
    return made


def sampling_options(
    *also: str, max_tokens: int | None = None, temperature: float = 1.0
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Add the options that choose tokens and end an answer to a command, which receives `params`.

    What is not given stays open in them, for the model's own default.

    Args:
        also: options of the command's own that are fields of the params too.
        max_tokens: the command's default.
        temperature: what the command takes where neither its user nor the model says one; for the help alone.
    """
    most = "all that fit" if max_tokens is None else str(max_tokens)
    shown = f"{temperature:g}"
    options = [
        click.option(
            "--max-tokens",
            type=int,
            default=max_tokens,
            metavar="N",
            help=f"Tokens to generate at most. [default: {most}]",
        ),
        *(
            click.option(
                f"--{name.replace('_', '-')}", name, type=kind, metavar=metavar, help=text.format(temperature=shown)
            )
            for name, kind, metavar, text in _SAMPLING
        ),
        *(click.option(flag, name, multiple=True, metavar=metavar, help=text) for flag, name, metavar, text in _TEXTS),
        click.option(
            "--logits-processor",
            "logits_processors",
            multiple=True,
            callback=_read_processors,
            metavar="KEY.OPTION=VALUE",
            help="Set an option of one of the engine's logits processors, as JSON or text. Repeatable.",
        ),
    ]

    def decorate(command: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(command)
        def call(*, max_tokens: int | None, **rest: Any) -> T:
            named = [*also, *(name for name, *_ in _SAMPLING), *(name for _, name, *_ in _TEXTS), "logits_processors"]
            given = {name: value for name in named if (value := rest.pop(name)) is not None}
            return command(params=SamplingParams(max_tokens=max_tokens, **given), **rest)

        # Decorators come in reverse: the first to be seen in the help is put on last.
        for option in reversed(options):
            call = option(call)
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
