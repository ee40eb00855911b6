"""`intarsia serve`: an engine behind a frontend, until it is told to stop."""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from typing import TYPE_CHECKING

import click
from attrs import evolve

from intarsia.cli.answerable import answerable
from intarsia.cli.loading import check_model, loading
from intarsia.cli.options import config_options
from intarsia.cli.signals import Signals
from intarsia.errors import ConfigError
from intarsia.types import Choice, EngineConfig

if TYPE_CHECKING:
    from intarsia.engine import Engine
    from intarsia.plugins import Registry
    from intarsia.protocols import Frontend


@click.command()
@config_options
@click.option("--bind", metavar="ADDRESS", help="Where to listen, such as tcp://127.0.0.1:5555; as frontend.bind.")
@click.pass_obj
def serve(signals: Signals, *, config: EngineConfig, bind: str | None) -> None:
    """Serve an engine to clients.

    SIGTERM and Ctrl-C drain: what runs is finished, nothing new is taken. A second one stops at once.
    """
    check_model(config)
    with signals.held():
        from intarsia.plugins import Registry
    registry = Registry.discover(config.engine.plugins)
    choice = _choice(config, registry)
    if bind is not None:
        choice = evolve(choice, options={**choice.options, "bind": bind})
    frontend = _frontend(evolve(config, frontend=(choice,)), registry)
    with answerable(registry.find("frontend", choice.use), "serve"):
        frontend.serve()


def _choice(config: EngineConfig, registry: Registry) -> Choice:
    """Return the frontend that the config names, or the one that there is."""
    if len(config.frontend) > 1:
        names = ", ".join(choice.use for choice in config.frontend)
        raise ConfigError(f"frontend: {names} are named; one engine has one way in: give one of them", field="frontend")
    if config.frontend:
        return config.frontend[0]
    offered = sorted(registry.offers("frontend"))
    if len(offered) != 1:
        which = f"{' and '.join(offered)} are installed; name one" if offered else "no plugin that is installed has one"
        raise ConfigError(f"frontend: none is named, and {which}", field="frontend")
    return Choice(offered[0])


def _frontend(config: EngineConfig, registry: Registry) -> Frontend:
    from intarsia.protocols import FrontendContext
    from intarsia.selection import Selector

    def start_engine() -> Engine:
        with loading() as progress, contextlib.redirect_stdout(sys.stderr):
            from intarsia.engine import Engine

            return Engine.from_config(config, progress=progress)

    context = partial(FrontendContext, engine=config.engine, config=config, start_engine=start_engine)
    frontend: Frontend = Selector(registry).one("frontend", config.frontend[0], context)
    return frontend
