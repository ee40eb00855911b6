"""`intarsia plugins check`: the contracts of an installed plugin's parts, run."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator

import click

from intarsia.cli.outcomes import FAILED
from intarsia.cli.plugins_facts import WHOLE, check_facts, names
from intarsia.cli.plugins_report import PartReport, as_data, as_text, failing
from intarsia.cli.plugins_trial import Contracted, Trial, check_installed
from intarsia.cli.terminal import fail, is_terminal, note, write
from intarsia.errors import ConfigError, IntarsiaError, did_you_mean
from intarsia.plugins import Offer, Plugin, Registry
from intarsia.structuring import shown
from intarsia.types import PluginsOptions

#: A claim's test that takes longer hangs.
_TIMEOUT_S = 600.0
#: Letters of a line that shows progress.
_LINE = 160


@click.command()
@click.argument("name")
@click.option(
    "--part",
    "parts",
    multiple=True,
    metavar="SLOT.KEY",
    help="Run this part alone: scheduler.mine. Repeatable.",
)
@click.option("--claim", "claims", multiple=True, metavar="NAME", help="Run this claim alone. Repeatable.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=_TIMEOUT_S,
    metavar="S",
    help=f"Seconds that one test of a claim may take. [default: {_TIMEOUT_S:g}]",
)
@click.option("--json", "wants_json", is_flag=True, help="Print a JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="Print a line a part, and what is broken.")
@click.option("-v", "--verbose", is_flag=True, help="Print the tracebacks of what is broken.")
def check(
    *,
    name: str,
    parts: tuple[str, ...],
    claims: tuple[str, ...],
    timeout_s: float,
    wants_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Run the contracts of a plugin's parts, and report.

    NAME is the plugin's, as `intarsia plugins` shows it. Each part runs under the suite of its kind, or under the
    contract that the plugin ships for it. A claim is kept, skipped (the part does not make it), broken, or untold: the
    contract must be told something first. Exits with 1 where a claim is broken, or nothing of a part is known. Parts
    whose claims are all skipped, such as those for a GPU that is not there, are told and do not count, unless the
    plugin has no others.
    """
    check_installed()
    with contextlib.redirect_stdout(sys.stderr):
        registry = _discover(name)
    plugin = next(each for each in registry.plugins if each.name == name)
    offers = {
        f"{offer.kind.slot}.{offer.provider.key}": offer for offer in registry.all_offers() if offer.plugin == plugin
    }
    chosen = _chosen(plugin, offers, parts)
    reports = _reports(plugin, offers, chosen, claims, timeout_s, whole=not parts)
    _check_claims(reports, claims)
    if claims:  # one that is asked for need not be one of every kind
        reports = [report for report in reports if report.results or report.error]
    if wants_json:
        write(json.dumps(as_data(plugin, reports, registry.deprecated), indent=2) + "\n")
    else:
        write(as_text(plugin, reports, quiet=quiet, verbose=verbose))
        for use in registry.deprecated:
            note(f"deprecated: {use}")
    if found := failing(reports):
        if any(report.fails for report in reports):
            fail(f"plugin {plugin.name!r} does not keep the contracts of {', '.join(found)}")
        else:
            fail(f"nothing of plugin {plugin.name!r} can be tried here: {', '.join(found)}")
        raise click.exceptions.Exit(FAILED)


def _discover(name: str) -> Registry:
    """Return the plugin's parts, beside the defaults and no other plugin's.

    Raises:
        ConfigError: there is no such plugin; the message has the nearest names.
        PluginError: it cannot be used; says why.
    """
    try:
        return Registry.discover(PluginsOptions(allow=(name,)))
    except ConfigError as error:
        # In the words of this command, which has no engine.plugins.allow.
        message = _whose(name) or str(error).partition(": ")[2]
        raise ConfigError(message, field="name") from None


def _whose(name: str) -> str:
    """Say which plugin has a part of this name, with its slot or without; nothing where none does."""
    try:
        registry = Registry.discover(PluginsOptions())
    except IntarsiaError:  # of another plugin, which nobody asked about
        return ""
    for offer in registry.all_offers():
        part = f"{offer.kind.slot}.{offer.provider.key}"
        if name in (part, offer.provider.key):
            return (
                f"no plugin {shown(name)} is installed; it is a part of {offer.plugin.name!r}: "
                f"intarsia plugins check {offer.plugin.name} --part {part}"
            )
    return ""


def _chosen(plugin: Plugin, offers: dict[str, Offer], parts: tuple[str, ...]) -> list[str]:
    for part in parts:
        if part not in offers:
            raise ConfigError(f"--part: {plugin} has no part {part!r}.{did_you_mean(part, offers)}", field="part")
    return list(dict.fromkeys(parts)) or list(offers)


def _reports(
    plugin: Plugin,
    offers: dict[str, Offer],
    chosen: list[str],
    claims: tuple[str, ...],
    timeout_s: float,
    *,
    whole: bool,
) -> list[PartReport]:
    """Check the plugin, unless parts are named, and run the contracts of the chosen parts."""
    reports = {part: PartReport(part, is_partial=bool(claims)) for part in chosen}
    if whole:
        facts = PartReport(WHOLE, results=list(check_facts(plugin, list(offers.values()), claims)))
        reports = {WHOLE: facts, **reports} if facts.results else reports
    if not chosen or (claims and all(claim in names() for claim in claims)):
        return list(reports.values())
    with _progress() as show:
        for found in Trial(plugin.name, chosen, claims, timeout_s, show).run():
            report = reports[found.part]
            if isinstance(found, Contracted):
                report.contract, report.error, report.known = found.contract or "", found.error, found.claims
            else:
                report.results.append(found)
    return list(reports.values())


def _check_claims(reports: Iterable[PartReport], claims: tuple[str, ...]) -> None:
    known = {*names(), *(claim for report in reports for claim in report.known)}
    for claim in claims:
        if claim not in known:
            raise ConfigError(
                f"--claim: none of these contracts has the claim {claim!r}.{did_you_mean(claim, known)}", field="claim"
            )


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, str], None]]:
    """Show, where a person looks on, which claim runs."""
    if not is_terminal(sys.stderr):
        yield lambda _part, _claim: None
        return

    def show(part: str, claim: str) -> None:
        sys.stderr.write(f"\r\x1b[K{part}: {claim}"[:_LINE])
        sys.stderr.flush()

    try:
        yield show
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
