"""A whole check on a GPU machine: tests, then every part of the benchmark, within a time; one JSON and one table."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from intarsia.errors import CompositionError
from intarsia_bench.gpu.parts import PARTS, Part, command_of, run_apart
from intarsia_bench.gpu.report import PartRun, Run, write
from intarsia_bench.gpu.targets import Figure

#: Of a whole check, in seconds.
BUDGET_S = 460.0
#: A part is not begun with less.
_LEAST_S = 10.0
_SHOWN_PACKAGES = ("intarsia", "torch", "triton", "transformers", "cuda-core", "cuda-bindings")


def machine() -> dict[str, str]:
    """Return the card and the versions.

    Raises:
        CompositionError: there is no CUDA device; says what is missing.
    """
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = "torch is built without CUDA" if built is None else f"torch is built for CUDA {built} and finds no GPU"
        raise CompositionError(f"no CUDA device: {why} (torch {torch.__version__})", field="engine.device")
    facts = torch.cuda.get_device_properties(0)
    found = {
        "card": f"{facts.name} (sm_{facts.major}{facts.minor}, {facts.multi_processor_count} multiprocessors, "
        f"{facts.total_memory / 2**30:.0f} GiB)",
        "CUDA": str(torch.version.cuda),
        "Python": platform.python_version(),
    }
    for name in _SHOWN_PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def check(
    tests: Path,
    out: Path,
    *,
    command: str,
    budget_s: float = BUDGET_S,
    parts: Sequence[Part] = PARTS,
    machine: Callable[[], dict[str, str]] = machine,
    say: Callable[[str], None] = print,
) -> Run:
    """Run the parts in turn, and write the report after each, so that whatever ends the check leaves one.

    Args:
        tests: the folder of the GPU tests.
        out: where the report goes.
        command: how this was called, for the report.
        budget_s: seconds for all parts together.
        parts: to run.
        machine: tells the card and the versions.
        say: told how it goes.

    Raises:
        CompositionError: there is no CUDA device.
    """
    facts, started = machine(), time.perf_counter()
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    runs = [PartRun(part.name, "not run", 0.0) for part in parts]
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        for index, part in enumerate(parts):
            left = budget_s - (time.perf_counter() - started)
            if left >= min(_LEAST_S, part.budget_s):
                path = Path(folder) / f"{part.name}.jsonl"
                seconds = min(part.budget_s, left)
                say(f"{part.name}: at most {seconds:.0f} s")
                done, found = run_apart(part, command_of(part, tests, path), path, seconds=seconds, cwd=tests.parent)
                say(f"{part.name}: {done.status} after {done.seconds:.0f} s {done.message}".rstrip())
                runs[index] = done
                figures += found
            else:
                runs[index] = PartRun(part.name, "not run", 0.0, "no time was left")
            run = Run(machine=facts, command=command, date=date, parts=tuple(runs), figures=tuple(figures))
            write(run, out)
    return run
