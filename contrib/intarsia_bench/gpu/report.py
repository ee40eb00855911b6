"""What a run found, as one JSON and one readable table: each target with its limit and the distance to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from intarsia_bench.gpu.targets import TARGETS, Figure, Target, with_derived

#: Of the JSON's layout.
VERSION = 1
NOT_MEASURED = "not measured"
#: Unit -> divisor and name of what the table shows.
_SHOWN = {"FLOP/s": (1e12, "TFLOP/s"), "B/s": (1e9, "GB/s"), "s": (1e-3, "ms"), "tokens/s": (1.0, "tokens/s")}


@frozen
class PartRun:
    """How a part went.

    Attributes:
        status: `ok`, `failed`, `out of time` or `not run`.
        message: the last lines of one that is not `ok`, or what tests found.
    """

    name: str
    status: str
    seconds: float
    message: str = ""


@frozen(kw_only=True)
class Run:
    """One run on one machine.

    Attributes:
        machine: card, memory, versions: name -> text.
        command: that made it.
        date: UTC, ISO 8601.
    """

    machine: Mapping[str, str]
    command: str
    date: str
    parts: Sequence[PartRun]
    figures: Sequence[Figure]


def as_json(run: Run) -> dict[str, Any]:
    """Return a run as plain data, the verdict on each target included; `reached` is null where nothing measured it."""
    figures = with_derived(run.figures)
    by_key = {figure["key"]: figure for figure in figures}
    targets = []
    for target in TARGETS:
        value = by_key.get(target.key, {}).get("value")
        met = None if value is None else target.met(float(value))
        targets.append({"key": target.key, "what": target.what, "need": target.need, "reached": value, "met": met})
    return {
        "version": VERSION,
        "date": run.date,
        "command": run.command,
        "machine": dict(run.machine),
        "parts": [asdict(part) for part in run.parts],
        "targets": targets,
        "figures": [dict(figure) for figure in figures],
    }


def _quantity(figure: Figure, field: str) -> str:
    if field not in figure:
        return ""
    divisor, unit = _SHOWN.get(figure.get("unit", ""), (1.0, figure.get("unit", "")))
    return f"{figure[field] / divisor:.4g} {unit}".strip()


def _row(target: Target, figure: Figure | None, part: PartRun | None) -> str:
    need = f"{'at most' if target.at_most else 'at least'} {target.shown(target.need)}"
    if figure is None or "value" not in figure:
        why = figure.get("note", "") if figure else ""
        if not why:
            why = "" if part is None or part.status == "ok" else f"{part.name}: {part.status}"
        return f"| {target.what} | {need} | {NOT_MEASURED}{f' ({_cell(why)})' if why else ''} | | | |"
    value = float(figure["value"])
    verdict = "met" if target.met(value) else "missed"
    # How far the limit is: where it lies beyond what was measured, times; nothing for shares of a step's time.
    distance = "" if target.at_most or value <= 0 else f"{1 / value:.2f}x"
    reached = f"{target.shown(value)} ({verdict})"
    cells = (target.what, need, reached, _quantity(figure, "measured"), _quantity(figure, "limit"), distance)
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    """Return text that does not break a table."""
    return " ".join(text.replace("|", "/").split())[:300]


def as_page(run: Run) -> str:
    """Return a run as a page of docs/results."""
    figures = with_derived(run.figures)
    by_key = {figure["key"]: figure for figure in figures}
    parts = {part.name: part for part in run.parts}
    lines = ["# On a GPU", ""]
    lines += [", ".join(f"{name} {value}" for name, value in run.machine.items()) + f"; {run.date}.", ""]
    lines += [f"`{run.command}`", ""]
    lines += [
        "Medians of rounds in which ours, the peer and the limit take turns in one process. A distance is how many"
    ]
    lines += ["times the limit, or the peer, is of what was measured.", ""]
    lines += [
        "| target | needed | reached | measured | limit or peer | distance |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [_row(target, by_key.get(target.key), parts.get(target.part)) for target in TARGETS]
    lines += ["", "| part | status | seconds | |", "| --- | --- | --- | --- |"]
    lines += [f"| {p.name} | {p.status} | {p.seconds:.0f} | {_cell(p.message)} |" for p in run.parts]
    others = [figure for figure in figures if figure["key"] not in {target.key for target in TARGETS}]
    if others:
        lines += ["", "| other figures | value | measured | limit | |", "| --- | --- | --- | --- | --- |"]
        for figure in others:
            value = _quantity({**figure, "unit": figure.get("unit", "") if "limit" not in figure else ""}, "value")
            cells = (figure["key"], value, _quantity(figure, "measured"), _quantity(figure, "limit"))
            lines.append(f"| {' | '.join(cells)} | {_cell(str(figure.get('note', '')))} |")
    return "\n".join(lines) + "\n"


def write(run: Run, folder: Path) -> tuple[Path, Path]:
    """Write `gpu.json` and `gpu.md` into a folder; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    data, page = folder / "gpu.json", folder / "gpu.md"
    data.write_text(json.dumps(as_json(run), indent=1) + "\n")
    page.write_text(as_page(run))
    return data, page
