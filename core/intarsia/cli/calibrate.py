"""`intarsia calibrate`: write what a model's linear layers are given on real text, for quantizers."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import click

from intarsia.cli.loading import check_model, loading
from intarsia.cli.measuring import model_options, text_option
from intarsia.cli.signals import Signals
from intarsia.cli.terminal import note, warn, write
from intarsia.errors import ConfigError
from intarsia.types import EngineConfig

#: Linears without a token that are named.
_SHOWN = 5


@click.command()
@model_options
@text_option("docstrings of the standard library")
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="FILE", help="What is written.")
@click.option(
    "--tokens", type=click.IntRange(1), default=16384, metavar="N", help="Tokens to run at most. [default: 16384]"
)
@click.option(
    "--window", type=click.IntRange(2), default=512, metavar="N", help="Tokens of a sequence at most. [default: 512]"
)
@click.pass_obj
def calibrate(
    signals: Signals, *, config: EngineConfig, text_file: Path | None, out: Path, tokens: int, window: int
) -> None:
    """Run MODEL over a text; write what its linear layers are given.

    Quantizers read the file that need to know activations: SmoothQuant, AWQ, Wanda. The model runs dense and eager,
    whatever the config says. Sequences are spread evenly over the text.
    """
    check_model(config)
    _check_writable(out)
    with signals.held():
        from intarsia import calibrating
        from intarsia.corpora import calibration_text, read_text
    text = calibration_text() if text_file is None else read_text(text_file)
    begun = time.perf_counter()
    with loading() as progress, contextlib.redirect_stdout(sys.stderr):
        calibration = calibrating.calibrate(config, text.content, tokens=tokens, window=window, progress=progress)
        calibration.save(out)
    if unseen := calibrating.unseen(calibration):
        shown = ", ".join(unseen[:_SHOWN]) + (", ..." if len(unseen) > _SHOWN else "")
        warn(f"no token of the text reached {len(unseen)} linears, whose statistics are zeros: {shown}")
    note(f"{time.perf_counter() - begun:.1f} s")
    counts = f"{len(calibration.inputs)} linears of {calibration.model}, {calibration.num_tokens} tokens"
    write(f"{out}: {counts} of {text.source}\n")


def _check_writable(out: Path) -> None:
    """Raise ConfigError where the file could not be written after all the work."""
    folder = out.absolute().parent
    if out.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"--out: {str(out)!r} cannot be written: it must be a file in a folder that exists")
