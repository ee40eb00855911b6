"""`intarsia bench --swap`: each composition that swaps a part beside the one that does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from intarsia.cli.terminal import write
from intarsia_bench.arriving import compare
from intarsia_bench.gains import DEFINITIONS, Pairs, gains_table, swaps_scheduler, verdicts
from intarsia_bench.peers import workloads
from intarsia_bench.terminal import show_all

if TYPE_CHECKING:
    from intarsia.protocols import Progress
    from intarsia_bench.composition import Composition
    from intarsia_bench.rounds import Series


def pairs_of(
    default: Composition,
    swapped: Mapping[str, Composition],
    series: Sequence[Series],
    *,
    repeats: int,
    arrivals: bool,
    progress: Progress,
) -> list[Pairs]:
    """Return the repeats of each swap beside the default's, by workload; those with arrivals are run here.

    Args:
        default: the first composition.
        swapped: what each swap was asked for as -> its composition.
        series: the repeats of all.
        repeats: how many.
        arrivals: whether schedulers are measured with arrivals too.
        progress: told of each measurement.
    """
    runs = {(one.workload, one.engine): one.measurements for one in series}
    pairs = [
        Pairs(
            name,
            one.name,
            runs[name, default.name],
            runs[name, one.name],
            [workloads.num_counted(name, repeat) for repeat in range(repeats)],
        )
        for name in dict.fromkeys(one.workload for one in series)
        for one in swapped.values()
    ]
    schedulers = [one for swap, one in swapped.items() if swaps_scheduler(swap)]
    if arrivals and schedulers:
        pairs += compare(default, schedulers, repeats, progress=progress)
    return pairs


def show_gains(gained: Sequence[Mapping[str, Any]]) -> None:
    """Show figures, verdicts and what they mean; nothing where nothing was swapped."""
    if not gained:
        return
    show_all(gains_table(gained))
    for line in (*verdicts(gained), *DEFINITIONS):
        write(line + "\n")
