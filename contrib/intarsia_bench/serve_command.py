"""`intarsia bench serve`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from intarsia.cli.options import config_options
from intarsia.cli.signals import Signals
from intarsia.cli.terminal import table, write
from intarsia.types import EngineConfig
from intarsia_bench.terminal import quietly, show_all

if TYPE_CHECKING:
    from rich.table import Table

#: What each figure means, as it is printed.
DEFINITIONS = (
    "streams: a scripted model, which computes nothing, behind a server process; all read by this one process",
    "mixed: the workload of `intarsia bench`, in this process and through a server, in turn; the ratio is the median",
    "TTFT: time to first token of one request at a time, of 64 tokens; medians, in turn",
    "neighbour: one stream of a scripted model with steps of a fixed length: alone, beside one that is stopped, and "
    "beside clients that come and go",
)


@click.command()
@config_options
@click.option(
    "--streams", type=click.IntRange(1), multiple=True, metavar="N", help="At once. Repeatable. [default: 1, 64, 512]"
)
@click.option("--repeat", "repeats", type=click.IntRange(1), default=5, metavar="N", help="Repeats. [default: 5]")
@click.option("--tokens", type=click.IntRange(1), default=40_000, metavar="N", help="Of all streams. [default: 40000]")
@click.option("--seconds", type=float, default=3.0, metavar="S", help="To watch a neighbour for. [default: 3]")
@click.option("--visits", type=click.IntRange(1), default=50, metavar="N", help="Beside the neighbour. [default: 50]")
@click.option("--json", "wants_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def serve(
    signals: Signals,
    *,
    config: EngineConfig,
    streams: tuple[int, ...],
    repeats: int,
    tokens: int,
    seconds: float,
    visits: int,
    wants_json: bool,
) -> None:
    """Measure what a server adds: streams of a model that computes nothing, a real one, and neighbours.

    Without -m the real one is left out.
    """
    with signals.held():
        from intarsia_bench.serving import Sizes, compare, neighbour_rates, stream_rates
    sizes = Sizes(
        streams=tuple(dict.fromkeys(streams)) or (1, 64, 512),
        repeats=repeats,
        tokens=tokens,
        seconds=seconds,
        visits=visits,
    )
    measured: dict[str, list[dict[str, Any]]] = {}
    with quietly() as progress:
        measured["streams"] = stream_rates(sizes, progress)
        if config.model.use:
            measured["mixed"], measured["ttft"] = compare(config, _arguments(), sizes, progress)
        measured["neighbour"] = neighbour_rates(sizes, progress)
    if wants_json:
        write(json.dumps(measured, indent=2) + "\n")
        return
    show_all(*tables(measured))
    write(f"medians of {repeats} repeats\n")
    for line in DEFINITIONS:
        write(line + "\n")


def _arguments() -> list[str]:
    """Return what of this command line names the composition, for a server's."""
    given = click.get_current_context().params
    named = [("-m", given["model"]), ("-c", given["file"]), *(("-o", each) for each in given["overrides"])]
    return [part for option, value in named if value is not None for part in (option, str(value))]


def tables(measured: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Table]:
    """Show what was measured: a table a part."""
    made = []
    streams = table("streams", "tokens/s", "min..max")
    for row in measured["streams"]:
        streams.add_row(str(row["streams"]), *_rates(row))
    made.append(streams)
    if "mixed" in measured:
        mixed = table("mixed", "tokens/s", "min..max", "ratio", "TTFT", "over in-process")
        for row, first in zip(measured["mixed"], measured["ttft"], strict=True):
            times = (f"{1e3 * first['ttft_s']:.2f} ms", f"{1e3 * first['over_s']:+.2f} ms")
            mixed.add_row(row["engine"], *_rates(row), f"{row['ratio']:.3f}x", *times)
        made.append(mixed)
    neighbour = table("neighbour, beside it", "tokens/s", "min..max", "ratio", "worst")
    for row in measured["neighbour"]:
        neighbour.add_row(row["beside"], *_rates(row), f"{row['ratio']:.3f}x", f"{row['worst_ratio']:.3f}x")
    made.append(neighbour)
    return made


def _rates(row: Mapping[str, Any]) -> tuple[str, str]:
    return f"{row['tokens_per_s']:.1f}", f"{row['min_tokens_per_s']:.1f}..{row['max_tokens_per_s']:.1f}"
