"""A picture of runs: tokens, batch occupancy and pages over time."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from intarsia.errors import ConfigError
from intarsia_bench.trace import TracedStep

#: engine -> workload -> its steps
Traces = Mapping[str, Mapping[str, Sequence[TracedStep]]]

_FORMATS = (".png", ".svg")
#: Told apart by those who see few colours (Okabe and Ito), and by their dashes.
_STYLES = (("#0072b2", "-"), ("#d55e00", "--"), ("#009e73", "-."), ("#cc79a7", ":"))


def check_can_plot(file: Path) -> None:
    """Check, before anything is measured, that a picture can be drawn.

    Raises:
        ConfigError: the file's name says no format, its folder is missing, or matplotlib is.
    """
    if file.suffix.lower() not in _FORMATS:
        raise ConfigError(f"--plot: {str(file)!r} ends in neither .png nor .svg", field="plot")
    if not file.parent.is_dir():
        raise ConfigError(f"--plot: there is no folder {str(file.parent)!r}", field="plot")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'intarsia[bench]'", field="plot")


def plot(traces: Traces, file: Path) -> None:
    """Draw a column a workload and a line an engine, and write the file."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(itertools.chain.from_iterable(traces.values())))
    figure = Figure(figsize=(1.5 + 4 * len(names), 8), layout="constrained")
    axes = figure.subplots(3, len(names), sharex="col", squeeze=False)
    for column, name in enumerate(names):
        panels = axes[:, column]
        for (engine, runs), (color, dashes) in zip(traces.items(), itertools.cycle(_STYLES), strict=False):
            _draw(panels, runs[name], engine, color, dashes)
        panels[0].set_title(name)
        panels[-1].set_xlabel("seconds")
    for panel, label in zip(axes[:, 0], ("tokens generated", "rows a step", "pages"), strict=True):
        panel.set_ylabel(label)
    for panel in axes.flat:
        panel.set_ylim(bottom=0)
        panel.set_xlim(left=0)
        panel.grid(alpha=0.3)
        panel.yaxis.get_major_locator().set_params(integer=True)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", frameon=False)
    axes[2, 0].legend(*_meanings(axes[2, 0]), frameon=False, fontsize="small")
    figure.savefig(file, dpi=120)


def _meanings(panel: Any) -> tuple[list[Any], list[str]]:
    """Return what the lines of the panel of pages mean, by the first engine's."""
    lines, labels = panel.get_legend_handles_labels()
    return lines[:2], labels[:2]


def _draw(panels: Any, steps: Sequence[TracedStep], engine: str, color: str, dashes: str) -> None:
    """Draw one run: each value holds from its step's start to its end."""
    times = [0.0, *(step.at_s for step in steps)]

    def stairs(panel: Any, values: Sequence[int], **style: Any) -> None:
        panel.plot(times, [values[0], *values], drawstyle="steps-pre", color=color, linestyle=dashes, **style)

    panels[0].plot(
        times,
        list(itertools.accumulate((step.tokens for step in steps), initial=0)),
        color=color,
        linestyle=dashes,
        label=engine,
    )
    stairs(panels[1], [step.rows for step in steps])
    stairs(panels[2], [step.used for step in steps], label="in use")
    stairs(panels[2], [step.cached for step in steps], alpha=0.45, linewidth=1, label="cached")
