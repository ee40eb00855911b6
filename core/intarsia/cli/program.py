"""The click group: our own commands, and those of plugins."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import click

from intarsia.cli.answerable import answerable
from intarsia.cli.calibrate import calibrate
from intarsia.cli.chat import chat
from intarsia.cli.evaluate import evaluate
from intarsia.cli.explain import explain
from intarsia.cli.generate import generate
from intarsia.cli.plugins import plugins
from intarsia.cli.serve import serve
from intarsia.cli.terminal import warn
from intarsia.config import load_config
from intarsia.errors import IntarsiaError, PluginError, did_you_mean
from intarsia.hookspecs import PROJECT
from intarsia.plugins import Offer, Registry
from intarsia.protocols import CommandContext, Parts
from intarsia.saying import said
from intarsia.types import EngineConfig, PluginsOptions


class _Program(click.Group):
    """A group whose further commands are parts of plugins, looked for only when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *self._offers(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        offer = self._offers(ctx).get(cmd_name)
        return None if offer is None else _build(offer)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        command = self.get_command(ctx, args[0])
        if command is None:
            known = self.list_commands(ctx)
            raise click.UsageError(f"no such command {args[0]!r}.{did_you_mean(args[0], known)}", ctx)
        return args[0], command, args[1:]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List commands by their summaries; those of plugins are not built for it."""
        own = [(name, command.get_short_help_str(limit=200)) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(own)
        offers = self._offers(ctx)
        if offers:
            with formatter.section("Commands of plugins"):
                formatter.write_dl([(key, f"{o.provider.summary} [{o.plugin.name}]") for key, o in offers.items()])

    def _offers(self, ctx: click.Context) -> dict[str, Offer]:
        """Return the plugins' commands by key, and warn once of what keeps some away."""
        found: dict[str, Offer] | None = ctx.meta.get("intarsia.commands")
        if found is None:
            found, troubles = _discover()
            for key in sorted(found.keys() & self.commands.keys()):
                troubles.append(f"command {key!r} of {found.pop(key).plugin} is left out: intarsia has its own")
            for trouble in troubles:
                warn(trouble)
            ctx.meta["intarsia.commands"] = found
        return found


def _discover() -> tuple[dict[str, Offer], list[str]]:
    """Return the commands of all plugins that work, and what is wrong with the others."""
    try:
        return Registry.discover().offers("commands"), []
    except IntarsiaError as error:
        whole = str(error)
    offers: dict[str, list[Offer]] = {}
    troubles = []
    for name in _installed():
        try:
            alone = Registry.discover(PluginsOptions(allow=(name,)))
        except IntarsiaError as error:
            troubles.append(str(error))
            continue
        for key, offer in alone.offers("commands").items():
            if offer.plugin not in [known.plugin for known in offers.setdefault(key, [])]:
                offers[key].append(offer)
    # A command that two plugins claim is nobody's.
    return {key: rivals[0] for key, rivals in offers.items() if len(rivals) == 1}, troubles or [whole]


def _installed() -> list[str]:
    try:
        return sorted({entry.name for entry in importlib.metadata.entry_points(group=PROJECT)})
    except Exception:  # one malformed entry_points.txt; discovery has said so
        return []


def _build(offer: Offer) -> click.Command:
    provider = offer.provider
    try:
        context = CommandContext(options=provider.options(), load_config=load_config, compose=_compose)
        command: Any = provider.build(context).command()
    except IntarsiaError:
        raise
    except Exception as error:
        raise PluginError(f"{offer.plugin}: command {provider.key!r} cannot be made: {said(error)}") from error
    if not isinstance(command, click.Command):
        raise PluginError(f"{offer.plugin}: command {provider.key!r} is {command!r}, not a click command")
    command.invoke = partial(_invoke, offer, command.invoke)  # type: ignore[method-assign]
    return command


def _invoke(offer: Offer, invoke: Callable[[click.Context], Any], context: click.Context) -> Any:
    with answerable(offer, "run"):
        return invoke(context)


def _compose(config: EngineConfig) -> Parts:
    from intarsia.compose import compose

    return compose(config, Registry.discover(config.engine.plugins))


def _debug(_: click.Context, __: click.Parameter, value: bool) -> None:
    if value:
        os.environ["INTARSIA_DEBUG"] = "1"


@click.group(cls=_Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--debug", is_flag=True, expose_value=False, callback=_debug, help="Show the traceback of errors; INTARSIA_DEBUG=1."
)
@click.version_option(package_name="intarsia", message="%(prog)s %(version)s")
def program() -> None:
    """Run large language models with an engine that is made of plugins."""


program.add_command(generate)
program.add_command(chat)
program.add_command(plugins)
program.add_command(explain)
program.add_command(serve)
program.add_command(calibrate)
program.add_command(evaluate)
