"""`intarsia quantize`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from attrs import frozen

from intarsia.errors import ConfigError
from intarsia.protocols import CommandContext, Parts

#: What composes quickest: nothing runs.
_PARTS = {"kernels": "torch", "runner": "eager", "attention": "sdpa", "scheduler": "static"}
#: Options of quantizers whose defaults are made for our kernels: other engines run int8 with a scale a row alone.
_OPTIONS: dict[str, dict[str, Any]] = {"int8": {"group": 0}}
#: Options of methods that read a calibration.
_METHODS = tuple(f"quantizer.{name}" for name in ("calibration", "smooth", "awq", "clip", "gptq", "method"))
_DTYPES = ("auto", "bfloat16", "float16", "float32")


@frozen
class QuantizeCommand:
    """The command, as a part."""

    context: CommandContext

    def command(self) -> click.Command:
        """Return the click command."""
        params: list[click.Parameter] = [
            click.Argument(["model"], metavar="MODEL"),
            click.Option(["--to"], required=True, metavar="KEY", help="A quantizer: int8, int4."),
            click.Option(
                ["--out"], required=True, metavar="DIR", type=click.Path(path_type=Path), help="The folder to write."
            ),
            click.Option(
                ["--calibration"], metavar="FILE", help="What `intarsia calibrate` wrote, for methods that need it."
            ),
            click.Option(
                ["--calibrate"], metavar="FILE", help="Calibrate on this text first, for methods that need it."
            ),
            click.Option(
                ["--dtype"],
                type=click.Choice(_DTYPES),
                default="auto",
                help="Of what is not quantized. [default: float16 if the model is, else bfloat16]",
            ),
            click.Option(["--force"], is_flag=True, help="Replace the files of a folder that holds some."),
            click.Option(
                ["-o", "--override", "overrides"],
                metavar="PATH=VALUE",
                multiple=True,
                help="Set one value of the config, such as quantizer.group=32. Repeatable.",
            ),
        ]
        return click.Command("quantize", callback=self._run, params=params, help=_HELP, short_help=_HELP.split("\n")[0])

    def _run(
        self,
        *,
        model: str,
        to: str,
        out: Path,
        calibration: str | None,
        calibrate: str | None,
        dtype: str,
        force: bool,
        overrides: tuple[str, ...],
    ) -> None:
        if calibration is not None and calibrate is not None:
            raise click.UsageError("--calibration and --calibrate are both given; one says what is calibrated on")
        with tempfile.TemporaryDirectory(prefix="intarsia-") as folder:
            if calibrate is not None:
                calibration = str(Path(folder) / "calibration.safetensors")
                _calibrate(model, calibrate, calibration)
            parts = self._compose(model, to, calibration, overrides)
            plain = None if calibration is None else self._compose(model, to, None, _uncalibrated(overrides))
            self._write(parts, plain, out, dtype, force=force)

    def _compose(self, model: str, to: str, calibration: str | None, overrides: Sequence[str]) -> Parts:
        quantizer = {"use": to, **_OPTIONS.get(to, {})} | ({} if calibration is None else {"calibration": calibration})
        # One token's cache, since none will run; weights are read one by one, as floats.
        engine = {"device": "cpu", "dtype": "float32", "max_model_len": 1}
        table: dict[str, Any] = {
            **_PARTS,
            "model": {"use": model, "weights": "dense"},
            "engine": engine,
            "quantizer": quantizer,
            "cache": {"use": "contiguous", "memory": "64MiB"},
        }
        config = self.context.load_config(table, overrides)
        if not config.quantizer:
            raise ConfigError(f"--to: {to!r} is no quantizer", field="--to")
        return self.context.compose(config)

    def _write(self, parts: Parts, plain: Parts | None, out: Path, dtype: str, *, force: bool) -> None:
        import torch

        from intarsia_quantized.exporting import write

        if dtype == "auto":
            dtype = "float16" if parts.checkpoint.dtype == "float16" else "bfloat16"
        written = write(parts, out, dtype=getattr(torch, dtype), force=force, plain=plain)
        counts = ", ".join(f"{count} {name}" for name, count in written.formats.items())
        also = f", {len(written.others)} linears in {dtype}" if written.others else ""
        sys.stdout.write(f"{out}: {counts}{also}; {written.num_bytes / 1e6:.1f} MB\n")


_HELP = """Quantize MODEL into a folder that transformers and vLLM load too.

The folder is of compressed-tensors. It appears whole or not at all; `intarsia generate -m DIR` runs it in its bits."""


def _uncalibrated(overrides: Sequence[str]) -> list[str]:
    """Leave out the options of methods that calibration is for."""
    return [one for one in overrides if one.partition("=")[0].strip() not in _METHODS]


def _calibrate(model: str, text: str, out: str) -> None:
    """Run `intarsia calibrate`."""
    context = click.get_current_context()
    program = context.find_root().command
    assert isinstance(program, click.Group)
    command = program.get_command(context.find_root(), "calibrate")
    assert command is not None
    command.main([model, "--text", text, "--out", out], "calibrate", standalone_mode=False, obj=context.obj)


def build(context: CommandContext) -> QuantizeCommand:
    """Make the part."""
    return QuantizeCommand(context)
