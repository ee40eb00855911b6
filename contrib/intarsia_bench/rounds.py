"""Who is measured when: contenders in turn, so that a machine that changes its pace does so for all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from attrs import Factory, define

from intarsia_bench.contender import Contender, Measurement
from intarsia_bench.latency import Latencies
from intarsia_bench.peers import workloads

if TYPE_CHECKING:
    from intarsia.protocols import Progress

#: Between two contenders: what spins after its work goes to sleep.
SETTLE_S = 0.2


@define
class Series:
    """The repeats of one workload by one contender."""

    engine: str
    workload: str
    measurements: list[Measurement] = Factory(list)

    @property
    def seconds(self) -> list[float]:
        """Of each repeat, in order."""
        return [measurement.seconds for measurement in self.measurements]

    @property
    def rates(self) -> list[float]:
        """Tokens a second of each repeat, in order."""
        # A subtraction can leave next to nothing where a model is tiny.
        return [
            workloads.num_counted(self.workload, repeat) / max(seconds, 1e-9)
            for repeat, seconds in enumerate(self.seconds)
        ]

    @property
    def tokens_per_s(self) -> float:
        """The median."""
        return statistics.median(self.rates)

    @property
    def latencies(self) -> Latencies | None:
        """Those of all repeats together."""
        known = [m.latencies for m in self.measurements if m.latencies is not None]
        return sum(known[1:], known[0]) if known else None


def run_rounds(
    contenders: Sequence[Contender],
    names: Sequence[str],
    repeats: int,
    *,
    progress: Progress,
    before_round: Callable[[], object] = lambda: None,
    settle_s: float = SETTLE_S,
) -> list[Series]:
    """Measure workload by workload: in each repeat, every contender once, one after another.

    Args:
        contenders: never two of them at once.
        names: of workloads.
        repeats: how often each contender runs each workload.
        progress: told of each measurement before it begins.
        before_round: called before each repeat, such as to measure the machine.
        settle_s: seconds of rest before each measurement.

    Returns:
        One series a workload and contender, in that order.
    """
    series = [Series(contender.name, name) for name in names for contender in contenders]
    done = 0
    for first, name in enumerate(names):
        for repeat in range(repeats):
            before_round()
            for index, contender in enumerate(contenders):
                progress(f"{name} {repeat + 1}/{repeats}: {contender.name}", done, len(series) * repeats)
                time.sleep(settle_s)
                series[first * len(contenders) + index].measurements.append(contender.measure(name, repeat))
                done += 1
    return series
