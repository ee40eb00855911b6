"""`intarsia live`: what a running server's engine is made of, what was swapped, and where its time goes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from intarsia_zmq.client import Client
from intarsia_zmq.client_command import connection_options
from intarsia_zmq.swap_command import told

#: Titles of the table, and which of its columns hold numbers.
_TITLES = ("slot", "part", "provider", "by", "share", "seconds", "calls", "why")
_NUMBERS = (4, 5, 6)


@click.command()
@connection_options
@click.option("--json", "wants_json", is_flag=True, help="Print a JSON object: explained, figures.")
def live(*, connection: dict[str, Any], wants_json: bool) -> None:
    """Show what a running server's engine is made of, what was swapped, and where its time goes.

    `intarsia explain --live` is the same. Share: of the time of all parts since the engine started.
    """
    with Client(**connection) as server:
        explained, figures = server.explain(), server.stats()
    if wants_json:
        click.echo(json.dumps({"explained": explained, "figures": figures}, indent=2))
        return
    for line in lines(explained, figures):
        click.echo(line)


def lines(explained: Mapping[str, Any], figures: Mapping[str, Any]) -> Iterator[str]:
    """Return the report: a table of parts, what was swapped, and the state of things."""
    yield from _table([_TITLES, *_rows(explained.get("parts", {}), figures["engine"].get("time", {}))])
    swaps = explained.get("swaps", ())
    if swaps:
        yield ""
    for done in swaps:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(done["time"]))
        yield f"swapped {at}  {told(done)}"
    engine, server = figures["engine"], figures.get("server", {})
    yield ""
    yield (
        f"{server.get('state', 'unknown')}: {engine.get('running', 0)} sequences run, {engine.get('waiting', 0)} wait; "
        f"{engine.get('steps', 0)} steps, {engine.get('generated_tokens', 0)} tokens so far"
    )
    yield f"hash {explained['hash']}"


def _rows(parts: Mapping[str, Any], spent: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """Return a row a part, and one for whatever else took time: the loop, observers, parts that were swapped."""
    shown = set()
    for slot, chosen in parts.items():
        for part in chosen.get("all", [chosen]):
            name = f"{slot}.{part['key']}"
            shown.add(name)
            yield slot, part["key"], part["provider"], part["asked_by"], *_times(spent.get(name)), part["reason"]
    for name, figures in spent.items():
        if name not in shown:
            slot, _, key = name.partition(".")
            yield slot, key, "", "", *_times(figures), ""


def _times(figures: Mapping[str, Any] | None) -> tuple[str, str, str]:
    if figures is None:
        return "", "", ""
    return f"{100 * figures['share']:.1f}%", f"{figures['seconds']:.3f}", str(figures["calls"])


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lay out rows in columns; what a server says is kept to its line and its cell."""
    cells = [[_printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        laid = [
            cell.rjust(width) if index in _NUMBERS else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(laid).rstrip()


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
