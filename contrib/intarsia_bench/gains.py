"""What swapping a part gains and costs: repeats of both compositions in pairs, a ratio a figure, and a verdict."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from attrs import frozen

from intarsia.cli.terminal import table
from intarsia_bench.contender import Measurement

if TYPE_CHECKING:
    from rich.table import Table

#: The workload of schedulers alone, whose requests arrive one after another; see `arriving`.
ARRIVALS: Final = "skewed"
#: A difference that is smaller is none, however steady it is.
LEAST: Final = 0.01
#: Fewer repeats say nothing of noise.
LEAST_REPEATS: Final = 3
GAIN, COST, SAME, UNKNOWN = "gain", "cost", "no difference", "too few repeats"


@frozen
class Figure:
    """One figure of a repeat.

    Attributes:
        title: what tables call it.
        of: reads it from a repeat, given what it counts; None where there is none, such as a gap of answers of a token.
        more_is_better: else less is.
    """

    title: str
    of: Callable[[Measurement, int], float | None]
    more_is_better: bool = False


def _mean(name: str) -> Callable[[Measurement, int], float | None]:
    def mean(measurement: Measurement, count: int) -> float | None:
        del count
        values = getattr(measurement.latencies, name, ())
        return float(np.mean(values)) if values else None

    return mean


def _slowest(measurement: Measurement, count: int) -> float | None:
    del count
    values = () if measurement.latencies is None else measurement.latencies.e2e
    return float(np.percentile(values, 99)) if values else None


#: Seconds are means over the requests of a repeat.
FIGURES: Final[Mapping[str, Figure]] = {
    # A subtraction can leave next to nothing where a model is tiny.
    "tokens_per_s": Figure("tokens/s", lambda one, count: count / max(one.seconds, 1e-9), more_is_better=True),
    "ttft_s": Figure("TTFT", _mean("ttft")),
    "tpot_s": Figure("TPOT", _mean("tpot")),
    "e2e_s": Figure("E2E", _mean("e2e")),
    "e2e_p99_s": Figure("E2E p99", _slowest),
}
DEFINITIONS: Final = (
    "TPOT, time per output token: from a request's first token to its last, over the tokens behind the first",
    "ratio: of the swap to the default, the median of the repeats, which alternate; seconds are means over requests",
    f"gain, cost: all repeats agree, and their median is beyond {100 * LEAST:.0f}% and beyond half their spread",
)


@frozen
class Pairs:
    """The repeats of one workload by two compositions, in turn.

    Attributes:
        counts: tokens that the rate of each repeat counts.
    """

    workload: str
    engine: str
    default: Sequence[Measurement]
    swap: Sequence[Measurement]
    counts: Sequence[int]


def swaps_scheduler(swap: str) -> bool:
    """Whether the scheduler is among what a swap changes: then it is measured with arrivals too."""
    return any(part.partition("=")[0].split(".")[0].strip() == "scheduler" for part in swap.split(";"))


def verdict(ratios: Sequence[float], *, more_is_better: bool) -> str:
    """Say what ratios to the default come to: a gain or a cost beyond their noise, or no difference.

    Args:
        ratios: one a repeat, swap to default.
        more_is_better: whether a ratio above 1 is a gain.
    """
    if len(ratios) < LEAST_REPEATS:
        return UNKNOWN
    middle, spread = statistics.median(ratios), (max(ratios) - min(ratios)) / 2
    agree = min(ratios) > 1 or max(ratios) < 1
    if not agree or abs(middle - 1) <= max(LEAST, spread):
        return SAME
    return GAIN if (middle > 1) == more_is_better else COST


def gains(found: Sequence[Pairs]) -> list[dict[str, Any]]:
    """Return one row a workload, swap and figure, as plain data.

    Keys:
        workload, engine: what ran.
        figure: a key of `FIGURES`.
        default, swap: medians of the repeats.
        ratio, min_ratio, max_ratio: the median, least and most of the repeats' ratios, swap to default.
        verdict: gain, cost, no difference, or too few repeats.
    """
    return [row for pairs in found for name, figure in FIGURES.items() if (row := _row(pairs, name, figure))]


def _row(pairs: Pairs, name: str, figure: Figure) -> dict[str, Any] | None:
    values = [
        (figure.of(one, count), figure.of(other, count))
        for one, other, count in zip(pairs.default, pairs.swap, pairs.counts, strict=True)
    ]
    known = [(one, other) for one, other in values if one and other]
    if not known:
        return None
    ratios = [other / one for one, other in known]
    return {
        "workload": pairs.workload,
        "engine": pairs.engine,
        "figure": name,
        "default": float(f"{statistics.median(one for one, _ in known):.6g}"),
        "swap": float(f"{statistics.median(other for _, other in known):.6g}"),
        "ratio": round(statistics.median(ratios), 3),
        "min_ratio": round(min(ratios), 3),
        "max_ratio": round(max(ratios), 3),
        "verdict": verdict(ratios, more_is_better=figure.more_is_better),
    }


def gains_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Show each figure of both, its ratio and the verdict."""
    listed = table(
        "workload", "engine", "figure", "default", "swap", "ratio", "min..max", "verdict", whole=("workload",)
    )
    before = ("", "")
    for row in rows:
        here = row["workload"], row["engine"]
        listed.add_row(
            *(("", "") if here == before else here),
            FIGURES[row["figure"]].title,
            _shown(row["figure"], row["default"]),
            _shown(row["figure"], row["swap"]),
            f"{row['ratio']:.2f}x",
            f"{row['min_ratio']:.2f}..{row['max_ratio']:.2f}",
            row["verdict"],
        )
        before = here
    return listed


def _shown(figure: str, value: float) -> str:
    return f"{value:.1f}" if figure == "tokens_per_s" else f"{1e3 * value:.1f} ms"


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say in a line a workload and swap what is gained and what it costs."""
    lines = []
    for here in dict.fromkeys((row["workload"], row["engine"]) for row in rows):
        mine = [row for row in rows if (row["workload"], row["engine"]) == here]
        said = [f"{word} {_listed(mine, word)}" for word in (GAIN, COST) if any(r["verdict"] == word for r in mine)]
        if not said:
            said = [UNKNOWN if all(row["verdict"] == UNKNOWN for row in mine) else f"{SAME} beyond noise"]
        lines.append(f"{here[0]}, {here[1]}: {'; '.join(said)}")
    return lines


def _listed(rows: Sequence[Mapping[str, Any]], word: str) -> str:
    return ", ".join(f"{FIGURES[r['figure']].title} {r['ratio']:.2f}x" for r in rows if r["verdict"] == word)
