"""What `intarsia plugins check` found, as text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
from attrs import define, field

from intarsia.cli.plugins_facts import WHOLE
from intarsia.cli.plugins_trial import ClaimResult, Outcome
from intarsia.plugins import Plugin

#: From the worst on: a claim with several tests is as good as its worst; one that was kept anywhere was made.
_ORDER: tuple[Outcome, ...] = ("broken", "untold", "kept", "skipped")
_WIDTH = 100
_INDENT = " " * 4


@define
class PartReport:
    """What is known of one part.

    Attributes:
        part: `slot.key`, or `plugin`.
        contract: the class of its contract; empty for the plugin as a whole.
        error: why its contract could not be run, or None.
        known: names of the claims that it has.
        results: of each test of its claims.
        is_partial: whether some claims alone were asked for, which the part need not make.
    """

    part: str
    contract: str = ""
    error: str | None = None
    known: tuple[str, ...] = ()
    results: list[ClaimResult] = field(factory=list)
    is_partial: bool = False

    def claims(self) -> list[ClaimResult]:
        """Return one result a claim: the worst of its tests'."""
        worst: dict[str, ClaimResult] = {}
        for result in self.results:
            known = worst.get(result.claim)
            if known is None or _ORDER.index(result.outcome) < _ORDER.index(known.outcome):
                worst[result.claim] = result
        seconds = {name: sum(r.seconds for r in self.results if r.claim == name) for name in worst}
        return [attrs.evolve(result, seconds=round(seconds[name], 3)) for name, result in worst.items()]

    def counts(self) -> dict[str, int]:
        """Return how many claims came out how."""
        outcomes = [result.outcome for result in self.claims()]
        return {outcome: outcomes.count(outcome) for outcome in ("kept", "skipped", "untold", "broken")}

    @property
    def fails(self) -> bool:
        """Whether a claim is broken, or nothing was found out, nor said why."""
        counts = self.counts()
        found = counts["kept"] + (counts["skipped"] if self.is_partial else 0)
        return self.error is not None or counts["broken"] > 0 or (found == 0 and not self.is_untried)

    @property
    def is_untried(self) -> bool:
        """Whether every claim is skipped: the part is for another machine than this."""
        counts = self.counts()
        return not self.is_partial and counts["skipped"] > 0 and counts["skipped"] == sum(counts.values())


def failing(reports: Sequence[PartReport]) -> list[str]:
    """Return the parts that a plugin fails by.

    Parts that are not tried are among them only where none of the plugin's is: then nothing is known of it.
    """
    is_tried = any(report.counts()["kept"] for report in reports if report.part != WHOLE)
    return [report.part for report in reports if report.fails or (report.is_untried and not is_tried)]


def as_text(plugin: Plugin, reports: Sequence[PartReport], *, quiet: bool, verbose: bool) -> str:
    """Return the report for people.

    Args:
        plugin: whose parts these are.
        reports: what is known of each.
        quiet: a line a part, and what is broken.
        verbose: with the traceback of what is broken.
    """
    lines = [f"{plugin.name} ({plugin.distribution} {plugin.version})"]
    width = max((len(report.part) for report in reports), default=0)
    for report in reports:
        lines.append(f"{report.part:{width}}  {_summary(report)}")
        lines += _findings(report, quiet=quiet, verbose=verbose)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _summary(report: PartReport) -> str:
    if report.error is not None:
        return f"not run: {report.error}"
    counts = report.counts()
    shown = [f"{counts[outcome]} {outcome}" for outcome in counts if counts[outcome] or outcome == "kept"]
    return f"{', '.join(shown)}{f'  {report.contract}' if report.contract else ''}"


def _findings(report: PartReport, *, quiet: bool, verbose: bool) -> Iterator[str]:
    """Yield what is not kept; claims that are left for one reason stand together."""
    claims = report.claims()
    for outcome in () if quiet else ("skipped", "untold"):
        reasons: dict[str, list[str]] = {}
        for result in claims:
            if result.outcome == outcome:
                reasons.setdefault(result.message, []).append(result.claim)
        for reason, names in reasons.items():
            yield from _wrapped(f"  {outcome}  {', '.join(names)}: {reason}")
    for result in claims:
        if result.outcome == "broken":
            seen = f"{result.claim} ({result.case})" if "[" in result.case else result.claim
            yield f"  broken   {seen}"
            yield from _wrapped(_INDENT * 2 + result.says) if result.says else ()
            yield from (f"{_INDENT * 2}{line}" for line in result.message.splitlines())
            yield from (f"{_INDENT * 2}| {line}" for line in result.details.splitlines() if verbose)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=_INDENT * 2, break_long_words=False) or [text]


def as_data(plugin: Plugin, reports: Sequence[PartReport], deprecated: Sequence[object]) -> dict[str, Any]:
    """Return the report for programs; `deprecated` is what the plugin uses and that goes in a later release."""
    return {
        "plugin": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "ok": not failing(reports),
        "deprecated": [str(use) for use in deprecated],
        "parts": [
            {
                "part": report.part,
                "contract": report.contract or None,
                "error": report.error,
                **report.counts(),
                "claims": [
                    {
                        name: getattr(result, name)
                        for name in ("claim", "says", "outcome", "message", "details", "seconds")
                    }
                    for result in report.claims()
                ],
            }
            for report in reports
        ],
    }
