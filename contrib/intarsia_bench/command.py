"""`intarsia bench`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from attrs import frozen

from intarsia.cli.loading import check_model
from intarsia.cli.options import config_options
from intarsia.cli.signals import Signals
from intarsia.cli.terminal import write
from intarsia.protocols import Context
from intarsia.types import EngineConfig
from intarsia_bench import speculation_work
from intarsia_bench.gains import ARRIVALS, gains, swaps_scheduler
from intarsia_bench.peer import MODELS, Peer, command_of
from intarsia_bench.peers import workloads
from intarsia_bench.plot import check_can_plot, plot
from intarsia_bench.scaling_command import scaling
from intarsia_bench.serve_command import serve
from intarsia_bench.terminal import quietly, show_all

if TYPE_CHECKING:
    from intarsia.protocols import Progress
    from intarsia.text import Tokenizer
    from intarsia_bench.capacity import Capacity
    from intarsia_bench.composition import Composition
    from intarsia_bench.limits import Meter
    from intarsia_bench.trace import Trace, TracedStep


class BenchCommand:
    """The command, as a part."""

    def command(self) -> click.Command:
        """Return the click command."""
        return bench


def build(context: Context) -> BenchCommand:
    """Make the part."""
    del context
    return BenchCommand()


@frozen(kw_only=True)
class _Asked:
    """What was asked for, checked as far as it can be before anything loads."""

    config: EngineConfig
    names: tuple[str, ...]
    repeats: int
    vs: tuple[str, ...]
    swaps: tuple[str, ...]
    arrivals: bool
    peers: dict[str, list[str]]
    plot: Path | None


@click.group(invoke_without_command=True, subcommand_metavar="[micro|scaling|serve|speculation [OPTIONS]]")
@config_options
@click.option(
    "--workload",
    "names",
    type=click.Choice([*workloads.ALL, ARRIVALS]),
    multiple=True,
    help="Run this one. Repeatable. [default: all]",
)
@click.option("--repeat", "repeats", type=click.IntRange(1), default=3, metavar="N", help="Repeats. [default: 3]")
@click.option(
    "--vs",
    multiple=True,
    metavar="PART=KEY[;...]",
    help="Another composition, run in turn: what differs in it. Repeatable.",
)
@click.option(
    "--swap",
    "swaps",
    multiple=True,
    metavar="SLOT=KEY[;...]",
    help="As --vs, with a verdict: what a part gains and costs. Repeatable.",
)
@click.option(
    "--peer",
    "peers",
    multiple=True,
    metavar="NAME[:MODEL]",
    help=f"Another engine, run in turn: {', '.join(MODELS)}. Repeatable.",
)
@click.option(
    "--peers",
    "home",
    type=click.Path(path_type=Path),
    envvar="INTARSIA_PEERS",
    default=".peers",
    metavar="DIR",
    help="Where `make peers` has put them; INTARSIA_PEERS. [default: .peers]",
)
@click.option("--plot", "plot_file", type=click.Path(path_type=Path), metavar="FILE", help="A picture, .png or .svg.")
@click.option("--capacity", is_flag=True, help="How many requests of `mixed` a cache holds at once; runs no model.")
@click.option("--profile", "wants_profile", is_flag=True, help="Where the time of a decode16 step goes.")
@click.option("--json", "wants_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def bench(
    signals: Signals,
    *,
    config: EngineConfig,
    names: tuple[str, ...],
    repeats: int,
    vs: tuple[str, ...],
    swaps: tuple[str, ...],
    peers: tuple[str, ...],
    home: Path,
    plot_file: Path | None,
    capacity: bool,
    wants_profile: bool,
    wants_json: bool,
) -> None:
    """Measure an engine, others in turn with it, and the machine's limits.

    Workloads are fixed: greedy, prompts of random ids. The figure is the median of the repeats; repeats of all engines
    alternate. docs/benchmarks.md says what is measured and how the limits are found.
    """
    if _has_subcommand():
        return
    check_model(config)
    if (capacity and wants_profile) or ((capacity or wants_profile) and (names or swaps or peers or plot_file)):
        raise click.UsageError(
            "--capacity and --profile stand alone: without each other, --workload, --swap, --peer or --plot"
        )
    if len({*vs, *swaps}) < len(vs) + len(swaps):
        raise click.UsageError("--vs, --swap: one composition is named twice")
    if ARRIVALS in names and not any(map(swaps_scheduler, swaps)):
        raise click.UsageError(f"--workload {ARRIVALS} measures schedulers: add --swap scheduler=KEY")
    asked = _Asked(
        config=config,
        names=tuple(name for name in dict.fromkeys(names or workloads.ALL) if name != ARRIVALS),
        repeats=repeats,
        vs=vs,
        swaps=swaps,
        arrivals=not names or ARRIVALS in names,
        peers={peer: command_of(peer, home) for peer in dict.fromkeys(peers)},
        plot=plot_file,
    )
    if plot_file is not None:
        check_can_plot(plot_file)
    with signals.held():
        import intarsia.engine  # noqa: F401  Python breaks imports off badly
    if capacity:
        _show_capacity(asked, wants_json=wants_json)
    elif wants_profile:
        _show_profile(asked, wants_json=wants_json)
    else:
        _show_rates(asked, wants_json=wants_json)


def _has_subcommand() -> bool:
    """Whether another command follows; then nothing of this one is asked for, and nothing may be said in vain."""
    context = click.get_current_context()
    if context.invoked_subcommand is None:
        return False
    for parameter in context.command.params:
        if context.get_parameter_source(parameter.name or "") is click.core.ParameterSource.COMMANDLINE:
            option = parameter.opts[0]
            raise click.UsageError(
                f"{option} before `{context.invoked_subcommand}` has no effect; leave it out, or give it after it"
            )
    return True


bench.add_command(scaling)
bench.add_command(serve)


# --- micro ------------------------------------------------------------------------------------------------------------


@bench.command()
@config_options
@click.option("--repeat", "repeats", type=click.IntRange(1), default=50, metavar="N", help="Repeats. [default: 50]")
@click.option("--json", "wants_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def micro(signals: Signals, *, config: EngineConfig, repeats: int, wants_json: bool) -> None:
    """Measure the sampler and the detokenizer alone, on one core, beside the machine's limit.

    Sampling chooses from random logits and needs no model. Text is of the model's tokenizer; without -m it is left out.
    """
    with signals.held():
        from intarsia_bench.micro import measure, micro_table, notes
    tokenizer = None
    if config.model.use:
        with quietly():
            tokenizer = _tokenizer_of(config)
    measured = [one.plain() for one in measure(tokenizer, repeats)]
    if wants_json:
        write(json.dumps(measured, indent=2) + "\n")
        return
    show_all(micro_table(measured))
    for line in notes(repeats):
        write(line + "\n")


def _tokenizer_of(config: EngineConfig) -> Tokenizer | None:
    """Compose an engine, which loads no weights, for its tokenizer."""
    from intarsia.compose import compose
    from intarsia.plugins import Registry

    tokenizer: Tokenizer | None = compose(config, Registry.discover(config.engine.plugins)).tokenizer
    return tokenizer


# --- speculation ------------------------------------------------------------------------------------------------------


@bench.command()
@config_options
@click.option(
    "--workload",
    "names",
    type=click.Choice(list(speculation_work.ALL)),
    multiple=True,
    help="Run this one. Repeatable. [default: all]",
)
@click.option("--drafter", "drafters", multiple=True, metavar="KEY", help="Repeatable. [default: ngram, suffix]")
@click.option("--repeat", "repeats", type=click.IntRange(1, 8), default=5, metavar="N", help="Repeats. [default: 5]")
@click.option("--json", "wants_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def speculation(
    signals: Signals,
    *,
    config: EngineConfig,
    names: tuple[str, ...],
    drafters: tuple[str, ...],
    repeats: int,
    wants_json: bool,
) -> None:
    """Measure drafters against plain decoding, in turn, on chats that repeat their prompt and on chats that do not.

    A drafter that the config names keeps its options; the others have their defaults. Where the
    composition keeps bits whatever a step holds, answers must be equal; elsewhere rounding can change some.
    """
    check_model(config)
    with signals.held():
        from intarsia_bench.speculation import measure, speculation_table
    asked = tuple(dict.fromkeys(drafters)) or ("ngram", "suffix")
    with quietly() as progress:
        measured = measure(
            config, asked, tuple(dict.fromkeys(names)) or tuple(speculation_work.ALL), repeats, progress=progress
        )
    if wants_json:
        write(json.dumps(measured, indent=2) + "\n")
        return
    show_all(speculation_table(measured))
    write(f"medians of {repeats} repeats with prompts of their own; ratio: to plain decoding of the same prompt\n")


# --- rates ------------------------------------------------------------------------------------------------------------


def _show_rates(asked: _Asked, *, wants_json: bool) -> None:
    from intarsia_bench import report
    from intarsia_bench.latency import DEFINITIONS
    from intarsia_bench.limits import ModelCost
    from intarsia_bench.rounds import run_rounds
    from intarsia_bench.swaps import pairs_of, show_gains

    traces = _traces(asked)
    with quietly() as progress, contextlib.ExitStack() as stack:
        ours = _open(asked, progress, stack, traces)
        threads = ours[0].engine.parts.engine.threads or 1
        peers = [stack.enter_context(contextlib.closing(peer)) for peer in _peers(asked, threads, progress)]
        meter = _meter(ours)
        series = run_rounds([*ours, *peers], asked.names, asked.repeats, progress=progress, before_round=meter.sample)
        subjects = {
            one.name: report.Subject(ModelCost.of(one.engine.parts), one.engine.parts.engine.dtype, meter.limits)
            for one in ours
        }
        swapped = dict(zip(asked.swaps, ours[len(ours) - len(asked.swaps) :], strict=True))
        gained = gains(
            pairs_of(ours[0], swapped, series, repeats=asked.repeats, arrivals=asked.arrivals, progress=progress)
        )
        if asked.plot is not None:
            plot({one.name: _record(one, trace, asked) for one, trace in zip(ours, traces, strict=True)}, asked.plot)
    measured = report.rows(series, subjects)
    if wants_json:
        write(json.dumps({"rates": measured, "gains": gained} if asked.swaps else measured, indent=2) + "\n")
        return
    if measured:
        show_all(report.rates_table(measured), report.latencies_table(measured))
    show_gains(gained)
    if not measured:
        return
    machine = (*report.device_lines(meter.device), *report.machine_lines(meter.limits, threads))
    for line in (*machine, *DEFINITIONS.values()):
        write(line + "\n")


def _open(
    asked: _Asked, progress: Progress, stack: contextlib.ExitStack, traces: Sequence[Trace] = ()
) -> list[Composition]:
    from intarsia_bench.composition import Composition
    from intarsia_bench.variants import side_by_side

    opened = []
    for index, (name, config) in enumerate(side_by_side(asked.config, (*asked.vs, *asked.swaps)).items()):
        composition = Composition.open(
            name,
            config,
            workload_names=asked.names,
            plugins={"bench-trace": traces[index]} if traces else {},
            progress=progress,
        )
        opened.append(stack.enter_context(contextlib.closing(composition)))
    return opened


def _peers(asked: _Asked, threads: int, progress: Progress) -> Iterator[Peer]:
    for index, (name, command) in enumerate(asked.peers.items()):
        progress(f"starting {name}", index, len(asked.peers))
        yield Peer.start(name, command, threads)


def _meter(ours: Sequence[Composition]) -> Meter:
    from intarsia_bench.limits import Meter

    engines = [one.engine.parts.engine for one in ours]
    return Meter(tuple(dict.fromkeys([*(e.dtype for e in engines), "bfloat16", "float32"])), engines[0].device)


def _traces(asked: _Asked) -> list[Trace]:
    from intarsia_bench.trace import Trace

    return [Trace() for _ in range(1 + len(asked.vs) + len(asked.swaps))] if asked.plot is not None else []


def _record(composition: Composition, trace: Trace, asked: _Asked) -> dict[str, list[TracedStep]]:
    """Run each workload once more, after all measurements: reading the books takes time."""
    from intarsia_bench.composition import run

    recorded = {}
    for name in asked.names:
        trace.start()
        run(composition.engine, workloads.work(name, asked.repeats))
        recorded[name] = trace.take()
    return recorded


# --- capacity and profile ---------------------------------------------------------------------------------------------


def _show_capacity(asked: _Asked, *, wants_json: bool) -> None:
    from intarsia_bench import report
    from intarsia_bench.capacity import MEMORY, capacity, longest_request
    from intarsia_bench.variants import variants, with_memory

    with quietly() as progress:
        found: list[Capacity] = []
        compositions = variants(with_memory(asked.config, MEMORY), asked.vs or ("cache=contiguous",))
        for max_model_len in (longest_request(), None):
            for name, config in compositions.items():
                progress(f"capacity: {name}", len(found), 2 * len(compositions))
                found.append(capacity(name, config, max_model_len=max_model_len))
    plain = report.capacities(found)
    if wants_json:
        write(json.dumps(plain, indent=2) + "\n")
        return
    show_all(report.capacities_table(plain))
    write(
        "requests of `mixed` that run at once while others wait, in caches of equal bytes; ratio: to the other cache\n"
    )


def _show_profile(asked: _Asked, *, wants_json: bool) -> None:
    from attrs import asdict

    from intarsia_bench import report
    from intarsia_bench.profiling import profile

    with quietly() as progress, contextlib.ExitStack() as stack:
        profiles = {
            one.name: profile(one.engine, asked.repeats) for one in _open(_only_decode16(asked), progress, stack)
        }
    if wants_json:
        write(json.dumps({name: asdict(one) for name, one in profiles.items()}, indent=2) + "\n")
        return
    show_all(report.profile_table(profiles))
    write(f"medians of {min(one.num_steps for one in profiles.values())} decode16 steps\n")


def _only_decode16(asked: _Asked) -> _Asked:
    from attrs import evolve

    return evolve(asked, names=("decode16",))
