"""`intarsia plugins`: what was discovered, by hook; with `check` and `new`, for authors."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import click

from intarsia.cli.options import plugin_options
from intarsia.cli.plugins_check import check
from intarsia.cli.plugins_new import new
from intarsia.cli.terminal import note, show, table, write
from intarsia.deprecations import uses
from intarsia.errors import did_you_mean
from intarsia.hookspecs import KINDS, hook_docs
from intarsia.plugins import Registry
from intarsia.types import EngineConfig


class _Group(click.Group):
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands:
            raise click.UsageError(f"no such command {args[0]!r}.{did_you_mean(args[0], self.commands)}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_Group, invoke_without_command=True)
@plugin_options
@click.option("--json", "wants_json", is_flag=True, help="Print a JSON list.")
@click.pass_context
def plugins(context: click.Context, *, config: EngineConfig, wants_json: bool) -> None:
    """List the parts that plugins offer, by hook.

    Plugins are chosen with `plugins.allow` and `plugins.block`: -o 'plugins.allow=[]' is the bare core.

    For authors: `check` runs the contracts of a plugin's parts, `new` writes a plugin to begin with.
    """
    if context.invoked_subcommand is not None:
        if any(context.params.values()):
            raise click.UsageError(f"-c, -o and --json are for the list; give {context.invoked_subcommand} its own")
        return
    with contextlib.redirect_stdout(sys.stderr):
        registry = Registry.discover(config.engine.plugins)
    rows = _rows(registry)
    if wants_json:
        write(json.dumps(rows, indent=2) + "\n")
        return
    _print_table(rows)
    if registry.left_out:
        note(f"left out by plugins.allow or .block: {', '.join(registry.left_out)}")
    for use in (*registry.deprecated, *uses("name")):
        note(f"deprecated: {use}")


plugins.add_command(check)
plugins.add_command(new)


def _rows(registry: Registry) -> list[dict[str, Any]]:
    """Return every part, then the hooks that check and observe, which have no key."""
    rows: list[dict[str, Any]] = [
        {
            "hook": offer.kind.hook,
            "key": offer.provider.key,
            "plugin": offer.plugin.name,
            "distribution": offer.plugin.distribution,
            "version": offer.plugin.version,
            "summary": offer.provider.summary,
        }
        for offer in registry.all_offers()
    ]
    providing = {kind.hook for kind in KINDS}
    for hook in (name for name in hook_docs() if name not in providing):
        for implementation in getattr(registry.hook, hook).get_hookimpls():
            plugin = next(p for p in registry.plugins if p.module is implementation.plugin)
            lines = (implementation.function.__doc__ or "").strip().splitlines()
            rows.append(
                {
                    "hook": hook,
                    "key": None,
                    "plugin": plugin.name,
                    "distribution": plugin.distribution,
                    "version": plugin.version,
                    "summary": lines[0] if lines else "",
                }
            )
    return rows


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.text import Text

    listed = table("hook", "key", "plugin", "of", "summary", whole=("key",))
    hook = ""
    for row in rows:
        owner = f"{row['distribution']} {row['version']}"
        # A summary can hold square brackets: no markup.
        cells = [Text(str(cell)) for cell in (row["key"] or "", row["plugin"], owner, row["summary"])]
        cells[0].stylize("bold")
        listed.add_row("" if row["hook"] == hook else row["hook"], *cells)
        hook = row["hook"]
    show(listed)
