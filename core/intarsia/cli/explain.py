"""`intarsia explain`: what an engine is made of and why, before any weights load."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

import click

from intarsia.cli.loading import check_model, loading
from intarsia.cli.options import config_options
from intarsia.cli.signals import Signals
from intarsia.cli.terminal import show, table, write
from intarsia.types import CacheLayout, EngineConfig

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from intarsia.protocols import Parts

#: The provider of the ops' references.
_REFERENCE = "torch"


@click.command()
@config_options
@click.option("--json", "wants_json", is_flag=True, help="Print a JSON object.")
@click.option("--live", "is_live", is_flag=True, help="Of a running server's engine: also swaps, and time per part.")
@click.option("--address", metavar="URL", help="With --live: the server's. `intarsia live` has options for keys.")
@click.pass_obj
def explain(signals: Signals, *, config: EngineConfig, wants_json: bool, is_live: bool, address: str | None) -> None:
    """Show an engine's parts, why each, and its memory.

    For each part: who provides it, who asked for it and why. The engine is composed and checked; no weights load.
    """
    if is_live:
        _ask_server(address, wants_json=wants_json)
        return
    if address is not None:
        raise click.UsageError("--address names a running server, which --live asks; add --live")
    check_model(config)
    report, parts = _compose(config, signals)
    if wants_json:
        write(json.dumps(report, indent=2) + "\n")
        return
    show(_parts(report["parts"]))
    write("\n")
    show(_facts(report, parts.layout))


def _ask_server(address: str | None, *, wants_json: bool) -> None:
    """Have the command `live` of a plugin that serves ask a running engine; usage errors name what means nothing."""
    context = click.get_current_context()
    for name in ("model", "file", "overrides"):
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--live shows what runs: it has no place for {name!r}; leave it out")
    program = context.parent
    command = (
        program.command.get_command(program, "live") if program and isinstance(program.command, click.Group) else None
    )
    if command is None:
        raise click.UsageError("--live: no plugin that is installed has the command `live`, which asks a server")
    arguments = [*(() if address is None else ("--address", address)), *(("--json",) if wants_json else ())]
    with command.make_context("live", arguments, parent=program) as live:
        command.invoke(live)


def _compose(config: EngineConfig, signals: Signals) -> tuple[dict[str, Any], Parts]:
    with loading(), contextlib.redirect_stdout(sys.stderr):
        with signals.held():
            from intarsia.compose import compose
            from intarsia.explain import explain as explained
            from intarsia.observers import Observers
            from intarsia.plugins import Registry
        registry = Registry.discover(config.engine.plugins)
        parts = compose(config, registry)
        return explained(config, parts, observers=Observers(registry).report()), parts


def _facts(report: dict[str, Any], layout: CacheLayout) -> Table:
    from rich.table import Table

    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, fact in (
        ("model", _model(report["model"])),
        ("engine", _engine(report["engine"])),
        *_device(report["device"]),
        *_memory(report["memory"], layout),
        *_parallel(report["parallel"]),
        ("steps", f"{report['steps']['in_flight']} in flight at most: {report['steps']['reason']}"),
        ("ops", _ops(report["ops"])),
        *_fused(report["fused"]),
        ("sampling", _sampling(report["sampling"])),
        ("invariance", _invariance(report["invariance"])),
        ("hash", report["hash"]),
        *(("observer", _observer(observer)) for observer in report["observers"]),
        *(("deprecated", said) for said in report["deprecated"]),
    ):
        facts.add_row(name, _text(fact))
    return facts


def _text(value: object) -> Text:
    """What parts say can hold square brackets: no markup."""
    from rich.text import Text

    return Text(str(value))


def _parts(parts: dict[str, Any]) -> Table:
    listed = table("slot", "part", "provider", "by", "why", whole=("slot", "by"))
    for slot, chosen in parts.items():
        for part in chosen.get("all", [chosen]):
            options = "".join(f"\n{name} = {json.dumps(value)}" for name, value in part["options"].items())
            cells = (slot, part["key"] + options, part["provider"], part["asked_by"], part["reason"])
            listed.add_row(*map(_text, cells))
    return listed


def _model(model: dict[str, Any]) -> str:
    heads = f"{model['heads']} heads over {model['kv_heads']} kv heads of {model['head_dim']}"
    return (
        f"{model['reference']}: {model['family']}, {model['parameters'] / 1e6:.1f} M parameters, "
        f"{model['layers']} layers of {model['embed_dim']}, {heads}, vocabulary {model['vocab_size']}, "
        f"trained for {model['max_len']} tokens"
    )


def _engine(engine: dict[str, Any]) -> str:
    threads = engine["threads"]
    return (
        f"{engine['device']}, {engine['dtype']}, {threads} {'thread' if threads == 1 else 'threads'}, "
        f"{engine['max_model_len']} tokens a sequence at most"
    )


def _device(device: dict[str, Any]) -> list[tuple[str, str]]:
    if not device:
        return []
    speed = device["bytes_per_s"]
    return [
        (
            "device",
            f"{device['name']}: compute capability {device['capability']}, {device['sms']} SMs with "
            f"{size(device['shared'])} of shared memory each, L2 {size(device['l2'])}, memory {size(device['memory'])} "
            f"at {'a bandwidth that is not told' if speed is None else f'{speed / 1e12:.2f} TB/s at most'}",
        )
    ]


def _memory(memory: dict[str, Any], layout: CacheLayout) -> list[tuple[str, str]]:
    scale = f" + {layout.scale_bytes} bytes of scale" if layout.scale_bytes else ""
    formulas = []
    for group in layout.groups:
        numbers = f"{group.head_dim} head dim x {layout.entry_bytes} bytes"
        vector = f"({numbers}{scale})" if scale else numbers
        formulas.append(f"2 x {len(group.layers)} layers x {group.num_kv_heads} kv heads x {vector}")
    rounded = ", rounded: outputs differ from those over floats" if scale else ""
    pages, page_size = memory["pages"], memory["page_size"]
    return [
        ("weights", size(memory["weights"])),
        (
            "cache",
            f"{size(memory['cache'])} in {pages} pages of {page_size} tokens, for {pages * page_size} tokens;"
            f" {layout.format}{rounded}, order {layout.order}",
        ),
        ("a token", f"{memory['token']} bytes = {' + '.join(formulas)}"),
        *_host(memory),
        ("batch", f"{memory['max_batch']} sequences at most, each of full length"),
        ("free", f"{size(memory['free'])} before loading"),
    ]


def _host(memory: dict[str, Any]) -> list[tuple[str, str]]:
    if not memory["host_pages"]:
        return []
    tokens = memory["host_pages"] * memory["page_size"]
    return [
        (
            "swap",
            f"{size(memory['host'])} of host memory in {memory['host_pages']} pages, for {tokens} tokens of preempted "
            f"sequences; {size(memory['staging'])} of buffers on the device",
        )
    ]


def _parallel(parallel: dict[str, Any]) -> list[tuple[str, str]]:
    """Say of each rank what it holds, and what goes between them."""
    if not parallel:
        return []
    tokens = ", activations sharded along tokens" if parallel["sequence"] else ""
    facts = [("ranks", f"{parallel['tp']} slices x {parallel['pp']} stages{tokens}; this is rank {parallel['rank']}")]
    for rank in parallel["ranks"]:
        first, stop = rank["layers"]
        facts.append(
            (
                f"rank {rank['rank']}",
                f"layers {first} to {stop - 1}, slice {rank['slice']}: weights {size(rank['weights'])}, cache "
                f"{size(rank['cache'])}, activations {size(rank['activations'])} a token at most; sends "
                f"{size(rank['sends'])} a token",
            )
        )
    if logits := parallel["logits"]:
        facts.append(
            ("logits", f"{size(logits['whole'])} a row from each slice to the first, {logits['likeliest']} if greedy")
        )
    if parallel["stage"]:
        facts.append(("stages", f"{size(parallel['stage'])} a token from one to the next"))
    return facts


def _ops(ops: dict[str, str]) -> str:
    """Name the ops that are not the references, by who implements them."""
    others: dict[str, list[str]] = {}
    for op, source in ops.items():
        if source != _REFERENCE:
            others.setdefault(source, []).append(op)
    if not others:
        return "all are torch's references"
    listed = "; ".join(f"{source}: {', '.join(names)}" for source, names in others.items())
    return f"{listed}; the others are torch's references"


def _fused(fused: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """Name the ops that save memory traffic, and how much."""
    if not fused:
        return []
    listed = ", ".join(f"{op} {facts['saves']}" for op, facts in fused.items())
    total = sum(facts["saves"] for facts in fused.values())
    return [("fused", f"{listed}: they save {total} bytes of memory traffic a token, over all layers")]


def _observer(observer: dict[str, Any]) -> str:
    return f"{observer['hook']} of {observer['plugin']} ({observer['distribution']} {observer['version']})"


def _sampling(sampling: dict[str, Any]) -> str:
    """Name the defaults of requests that do not say, those that the model recommends first."""
    recommended = sampling["recommended"]
    own = [name for name in sampling if name not in ("recommended", *recommended)]
    parts = []
    if recommended:
        parts.append(f"{_values(sampling, recommended)}, as the model recommends")
    if own:
        parts.append(_values(sampling, own) + (" otherwise" if recommended else ", where a request does not say"))
    return "; ".join(parts)


def _values(sampling: dict[str, Any], names: list[str]) -> str:
    return ", ".join(f"{name} {sampling[name]:g}" for name in names)


def _invariance(invariance: dict[str, Any]) -> str:
    """Name the level of the whole, and the parts that keep no more than that."""
    level = invariance["level"]
    weakest = [name for name, promise in invariance["by_part"].items() if promise == level]
    if len(weakest) == len(invariance["by_part"]):
        return f"{level}, in every part"
    return f"{level}, because of {', '.join(weakest)}"


def size(num_bytes: int) -> str:
    """Return bytes in the unit that people read: `513.1 MiB`."""
    value, units = float(num_bytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "bytes" else f"{value:.1f} {units[0]}"
