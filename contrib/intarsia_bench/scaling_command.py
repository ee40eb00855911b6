"""`intarsia bench scaling`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click
from attrs import asdict, evolve, frozen

from intarsia.cli.loading import check_model
from intarsia.cli.options import config_options
from intarsia.cli.signals import Signals
from intarsia.cli.terminal import table, write
from intarsia.config import load_config
from intarsia.errors import CompositionError
from intarsia.types import EngineConfig
from intarsia_bench.terminal import quietly, show_all

if TYPE_CHECKING:
    from rich.table import Table

    from intarsia.protocols import Parts
    from intarsia_bench.hardware import Link
    from intarsia_bench.limits import Limits
    from intarsia_bench.scaling import Layout, Machine, Step

#: Of `hardware.DEVICES` and `hardware.LINKS`, which need torch.
DEVICE_NAMES = ("a100", "h100", "h200")
LINK_NAMES = ("nvlink3", "nvlink4", "nvlink5", "pcie4x16", "pcie5x16", "ethernet100g", "infiniband400g")
_MICROSECOND, _GIGA, _TERA = 1e-6, 1e9, 1e12
_POSITIVE = click.FloatRange(0, min_open=True)


@frozen(kw_only=True)
class _Hardware:
    """What was said of devices and links; None is what the named one has, or what this machine is measured at."""

    device: str | None
    bandwidth: float | None
    peak: float | None
    link: str | None
    stage_link: str | None
    link_bandwidth: float | None
    link_latency: float | None


@click.command()
@config_options
@click.option(
    "--ranks",
    "sizes",
    type=click.IntRange(1),
    multiple=True,
    metavar="N",
    help="All ways in which N ranks can share the model. Repeatable. [default: 1, 2, 4, 8]",
)
@click.option("--layout", "layouts", multiple=True, metavar="TPxPP", help="This way, such as 4x2. Repeatable.")
@click.option(
    "--microbatches", type=click.IntRange(1), multiple=True, metavar="M", help="Repeatable. [default: one a stage]"
)
@click.option("--sequence", is_flag=True, help="With activations sharded along tokens.")
@click.option("--batch", type=click.IntRange(1), default=16, metavar="B", help="Sequences that decode. [default: 16]")
@click.option("--context", type=click.IntRange(0), default=1024, metavar="N", help="Keys of each. [default: 1024]")
@click.option("--prompt", type=click.IntRange(1), default=2048, metavar="N", help="Tokens to prefill. [default: 2048]")
@click.option("--sampled", is_flag=True, help="Rows need all logits, not the likeliest id alone.")
@click.option("--device", type=click.Choice(DEVICE_NAMES), help="Of each rank. [default: this machine's, measured]")
@click.option("--bandwidth", type=_POSITIVE, metavar="GB/s", help="Of a device's memory.")
@click.option("--peak", type=_POSITIVE, metavar="TFLOP/s", help="Of a device's matrix products.")
@click.option(
    "--link", type=click.Choice(LINK_NAMES), help="Between slices. [default: this machine's loopback, measured]"
)
@click.option("--stage-link", type=click.Choice(LINK_NAMES), help="Between stages. [default: as between slices]")
@click.option("--link-bandwidth", type=_POSITIVE, metavar="GB/s", help="Of the link between slices, in one direction.")
@click.option(
    "--link-latency", type=click.FloatRange(0), metavar="US", help="Microseconds of a message between slices."
)
@click.option("--json", "wants_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def scaling(
    signals: Signals,
    /,
    *,
    config: EngineConfig,
    sizes: tuple[int, ...],
    layouts: tuple[str, ...],
    microbatches: tuple[int, ...],
    sequence: bool,
    batch: int,
    context: int,
    prompt: int,
    sampled: bool,
    wants_json: bool,
    **hardware: Any,
) -> None:
    """Predict what slices and stages on several devices would make of a composition. Nothing is run.

    The model is documented in contrib/intarsia_bench/scaling.py with its assumptions; docs/benchmarks.md sums it up.
    """
    check_model(config)
    said = _Hardware(**hardware)
    if said.device and not (said.link or said.link_bandwidth):
        raise click.UsageError(f"--device {said.device} needs a --link: {', '.join(LINK_NAMES)}; or --link-bandwidth")
    with signals.held():
        from intarsia_bench.scaling import Step
    named = [_layout(text, sequence=sequence) for text in layouts]
    steps = {
        "decode": Step(rows=batch, seen=context, likeliest=not sampled),
        "prefill": Step(rows=1, tokens=prompt, likeliest=not sampled),
    }
    with quietly():
        parts = _composed(config)
        machine = _machine(said, parts)
        ways, refused = _ways(parts, named, sizes or (() if named else (1, 2, 4, 8)), sequence=sequence)
        rows = list(_rows(parts, ways, microbatches, machine, steps))
    if wants_json:
        write(json.dumps({"predicted": rows, "refused": refused, "machine": asdict(machine)}, indent=2) + "\n")
        return
    show_all(*tables(rows))
    for line in (*refused, *_notes(parts, machine, batch, context, prompt)):
        write(line + "\n")


def _layout(text: str, *, sequence: bool) -> Layout:
    from intarsia_bench.scaling import Layout

    found = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", text, flags=re.ASCII)
    if found is None:
        raise click.UsageError(f"--layout {text!r} is not TPxPP, such as 4x2: 4 slices and 2 stages")
    return Layout(int(found[1]), int(found[2]), sequence=sequence)


def _composed(config: EngineConfig) -> Parts:
    """Compose the whole model, which loads no weights."""
    from intarsia.compose import compose
    from intarsia.plugins import Registry

    whole = load_config(config, ["executor=local"])
    return compose(whole, Registry.discover(whole.engine.plugins))


def _machine(said: _Hardware, parts: Parts) -> Machine:
    from intarsia_bench.hardware import LINKS, Link, loopback
    from intarsia_bench.scaling import Machine

    if said.link is not None:
        link = LINKS[said.link]
    elif said.link_bandwidth is not None:
        link = Link(said.link_bandwidth * _GIGA)
    else:
        link = loopback()
    if said.link_bandwidth is not None:
        link = evolve(link, bytes_per_s=said.link_bandwidth * _GIGA)
    if said.link_latency is not None:
        link = evolve(link, latency_s=said.link_latency * _MICROSECOND)
    return Machine(_limits(said, parts), link, LINKS[said.stage_link] if said.stage_link else link)


def _limits(said: _Hardware, parts: Parts) -> Limits:
    from intarsia_bench.hardware import DEVICES
    from intarsia_bench.limits import Limits, Meter

    dtype = parts.engine.dtype
    bandwidth = None if said.bandwidth is None else said.bandwidth * _GIGA
    peak = None if said.peak is None else said.peak * _TERA
    if said.device is not None:
        known = DEVICES[said.device]
    elif bandwidth is not None and peak is not None:
        return Limits(bandwidth, {dtype: peak})
    else:
        import torch

        torch.set_num_threads(parts.engine.threads or 1)
        meter = Meter((dtype,), parts.engine.device)
        meter.sample()
        known = meter.limits
    return Limits(bandwidth or known.bytes_per_s, {dtype: peak or known.flops_per_s[dtype]})


def _ways(
    parts: Parts, named: Sequence[Layout], sizes: Sequence[int], *, sequence: bool
) -> tuple[list[Layout], list[str]]:
    """Return the layouts to show, the whole model on one rank first, and why others are left out.

    One that was named and cannot be is an error.
    """
    from intarsia_bench.scaling import Layout, share_out

    for layout in named:
        share_out(parts, layout)
    ways, refused = [Layout(sequence=sequence), *named], []
    for size in sizes:
        for tp in (tp for tp in range(size, 0, -1) if size % tp == 0):
            layout = Layout(tp, size // tp, sequence=sequence)
            try:
                share_out(parts, layout)
            except CompositionError as error:
                refused.append(f"{tp}x{size // tp} left out: {error}")
            else:
                ways.append(layout)
    return list(dict.fromkeys(ways)), refused


def _rows(
    parts: Parts, ways: Sequence[Layout], microbatches: Sequence[int], machine: Machine, steps: dict[str, Step]
) -> Iterator[dict[str, Any]]:
    """Yield a row a workload and layout.

    Keys:
        workload, tp, pp, microbatches, sequence: what it is of.
        weights, cache, sends: see `intarsia_bench.scaling.Prediction`; bytes.
        tokens_per_s, bubble: predicted.
        speed_up: over one rank; efficiency: that by the number of ranks.
    """
    from intarsia_bench.scaling import Scaling

    for name, step in steps.items():
        alone = Scaling(parts, ways[0], machine).predict(step).tokens_per_s
        for way in ways:
            most = step.rows if step.tokens == 1 else step.num_tokens
            for count in (microbatches if way.pp > 1 else ()) or (min(way.pp, most),):
                layout = evolve(way, microbatches=count)
                found = Scaling(parts, layout, machine).predict(step)
                speed_up = found.tokens_per_s / alone
                figures = asdict(found) | {"speed_up": speed_up, "efficiency": speed_up / layout.ranks}
                yield {"workload": name, **asdict(layout), **figures}


def tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """Show predictions, a table a workload."""
    made = []
    for name in dict.fromkeys(row["workload"] for row in rows):
        one = table(
            *(f"{name}, predicted", "microbatches", "weights a rank", "cache a rank", "sent a token"),
            *("bubble", "tokens/s", "speed-up", "efficiency"),
        )
        for row in (row for row in rows if row["workload"] == name):
            one.add_row(
                f"tp {row['tp']} x pp {row['pp']}",
                str(row["microbatches"]),
                f"{row['weights'] / 1e6:.1f} MB",
                f"{row['cache'] / 1e6:.1f} MB",
                f"{row['sends'] / 1e6:.3f} MB",
                f"{row['bubble']:.0%}",
                f"{row['tokens_per_s']:.4g}",
                f"{row['speed_up']:.2f}x",
                f"{row['efficiency']:.0%}",
            )
        made.append(one)
    return made


def _notes(parts: Parts, machine: Machine, batch: int, context: int, prompt: int) -> list[str]:
    limits, link, behind = machine.limits, machine.link, machine.stage_link
    dtype = parts.engine.dtype

    def said(one: Link) -> str:
        start = f" after {one.start_s / _MICROSECOND:.3g} us" if one.start_s else ""
        return f"{one.bytes_per_s / _GIGA:.3g} GB/s, {one.latency_s / _MICROSECOND:.3g} us a message{start}"

    return [
        "predicted, not measured: memory, matrix units and links at their peak, all else at no cost",
        f"decode: a step of {batch} sequences that see {context} keys; prefill: one prompt of {prompt} tokens",
        f"device: {limits.bytes_per_s / _GIGA:.4g} GB/s, {limits.flops_per_s[dtype] / _TERA:.4g} TFLOP/s in {dtype}",
        f"link between slices: {said(link)}; between stages: {said(behind)}",
    ]
