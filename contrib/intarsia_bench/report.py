"""What was measured, as rows for JSON and as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import asdict, frozen

from intarsia.cli.terminal import table
from intarsia_bench.capacity import Capacity
from intarsia_bench.latency import DEFINITIONS, PERCENTILES
from intarsia_bench.limits import Limits, ModelCost, bound
from intarsia_bench.profiling import SECTIONS, TARGET_MS, Profile
from intarsia_bench.rounds import Series

if TYPE_CHECKING:
    from rich.table import Table


@frozen
class Subject:
    """What the limits of a composition of ours rest on."""

    cost: ModelCost
    dtype: str
    limits: Limits


def rows(series: Sequence[Series], subjects: Mapping[str, Subject]) -> list[dict[str, Any]]:
    """Return one row a series, as plain data.

    Keys:
        engine, workload: what ran.
        tokens_per_s: the median of the repeats; min_tokens_per_s and max_tokens_per_s.
        seconds: of each repeat, in order.
        ratio: of the median to that of the workload's first row.
        ttft_s, itl_s, e2e_s: p50 and p99, for engines of ours.
        weight_bytes: that a step reads, for engines of ours.
        bound_tokens_per_s, of_bound, read_bytes_per_s, matmul_flops_per_s: the machine's limit, and the measured part
            of it, for engines of ours.
    """
    first = {one.workload: one.tokens_per_s for one in reversed(series)}
    return [_row(one, first[one.workload], subjects.get(one.engine)) for one in series]


def _row(series: Series, first: float, subject: Subject | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "engine": series.engine,
        "workload": series.workload,
        "tokens_per_s": round(series.tokens_per_s, 1),
        "min_tokens_per_s": round(min(series.rates), 1),
        "max_tokens_per_s": round(max(series.rates), 1),
        "seconds": [round(seconds, 4) for seconds in series.seconds],
        "ratio": round(series.tokens_per_s / first, 3),
    }
    if series.latencies is not None:
        for name, figures in series.latencies.figures().items():
            row[f"{name}_s"] = {key: round(seconds, 6) for key, seconds in figures.items()}
    if subject is not None:
        limit = bound(subject.cost, series.workload, len(series.measurements), subject.limits, subject.dtype)
        row["weight_bytes"] = subject.cost.weight_bytes
        row["bound_tokens_per_s"] = round(limit, 1)
        row["of_bound"] = round(series.tokens_per_s / limit, 4)
        row["read_bytes_per_s"] = round(subject.limits.bytes_per_s)
        row["matmul_flops_per_s"] = round(subject.limits.flops_per_s[subject.dtype])
    return row


# --- tables -----------------------------------------------------------------------------------------------------------


def rates_table(measured: Sequence[Mapping[str, Any]]) -> Table:
    """Show rates, ratios, and how far the machine's limit is."""
    titles = ("workload", "engine", "tokens/s", "min..max", "ratio", "weights", "limit", "of limit")
    listed = table(*titles, whole=("workload",))
    before = ""
    for row in measured:
        listed.add_row(
            "" if row["workload"] == before else row["workload"],
            row["engine"],
            f"{row['tokens_per_s']:.1f}",
            f"{row['min_tokens_per_s']:.1f}..{row['max_tokens_per_s']:.1f}",
            f"{row['ratio']:.2f}x",
            f"{row['weight_bytes'] / 1e6:.1f} MB" if "weight_bytes" in row else "",
            f"{row['bound_tokens_per_s']:.1f}" if "bound_tokens_per_s" in row else "",
            f"{100 * row['of_bound']:.0f}%" if "of_bound" in row else "",
        )
        before = row["workload"]
    return listed


def latencies_table(measured: Sequence[Mapping[str, Any]]) -> Table:
    """Show latencies, in milliseconds."""
    titles = [f"{name.upper()} p{q}" for name in DEFINITIONS for q in PERCENTILES]
    listed = table("workload", "engine", *titles, whole=("workload",))
    for row in measured:
        if "ttft_s" not in row:
            continue
        cells = [
            f"{1e3 * row[f'{name}_s'][f'p{q}']:.1f} ms" if f"{name}_s" in row else ""
            for name in DEFINITIONS
            for q in PERCENTILES
        ]
        listed.add_row(row["workload"], row["engine"], *cells)
    return listed


def device_lines(device: str) -> list[str]:
    """Say what a GPU is by its driver, beside what it was seen to do; nothing of CPUs."""
    if device == "cpu":
        return []
    from intarsia_cuda.device import device_facts

    return [device_facts(device).line()]


def machine_lines(limits: Limits, threads: int) -> list[str]:
    """Say what the machine was seen to do."""
    peaks = ", ".join(f"{flops / 1e9:.0f} GFLOP/s in {dtype}" for dtype, flops in limits.flops_per_s.items())
    return [
        f"machine, {threads} threads: reads {limits.bytes_per_s / 1e9:.1f} GB/s; matrix products {peaks} "
        "(the best of all rounds)",
        "weights: that a step reads",
        "limit: no less time than bytes / read bandwidth, and than operations / matrix peak; see docs/benchmarks.md",
    ]


def capacities(found: Sequence[Capacity]) -> list[dict[str, Any]]:
    """Return capacities as plain data; `ratio` is of the mean to that of the last row with an equal context."""
    last = {one.max_model_len: one.mean for one in found}
    return [
        asdict(one) | {"mean": round(one.mean, 2), "ratio": round(one.mean / last[one.max_model_len], 3)}
        for one in found
    ]


def capacities_table(found: Sequence[Mapping[str, Any]]) -> Table:
    """Show how many requests of `mixed` ran at once."""
    listed = table("max_model_len", "engine", "cache", "at once, mean", "peak", "ratio", "steps", "preempted")
    for row in found:
        listed.add_row(
            str(row["max_model_len"]),
            row["engine"],
            f"{row['cache_bytes'] / 2**20:.0f} MiB",
            f"{row['mean']:.1f}",
            str(row["peak"]),
            f"{row['ratio']:.2f}x",
            str(row["steps"]),
            str(row["preempted"]),
        )
    return listed


def profile_table(profiles: Mapping[str, Profile]) -> Table:
    """Show where a step's time goes."""
    listed = table("section", *profiles, "what it is", whole=("section",))
    for section, meaning in SECTIONS.items():
        cells = [f"{profile.sections[section]:.3f} ms" for profile in profiles.values()]
        listed.add_row(section, *cells, meaning)
    outside = [f"{profile.outside:.3f} ms" for profile in profiles.values()]
    listed.add_row("outside the model", *outside, f"all but the model; the target is {TARGET_MS:g} ms")
    return listed
