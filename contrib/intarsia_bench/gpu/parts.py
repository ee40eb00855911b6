"""The parts of a GPU check: each runs in a process of its own, for so long, and takes no other down with it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from intarsia_bench.gpu.report import PartRun
from intarsia_bench.gpu.targets import Figure

#: How much of a failed part's output is kept, in lines.
_KEPT_LINES = 12
#: What a part gets to end by itself, once it is told to.
_GRACE_S = 3.0


@frozen
class Part:
    """One part.

    Attributes:
        name: what it is called in the report.
        budget_s: seconds that it may take, the start of its process included.
        where: `module:function`, called with a setting and a function that takes figures; empty for the tests.
    """

    name: str
    budget_s: float
    where: str = ""


#: Correctness first. Together they take less than the eight minutes of a whole check.
PARTS = (
    Part("tests", 150),
    Part("prefill", 35, "intarsia_bench.gpu.attention:prefill"),
    Part("paged_decode", 35, "intarsia_bench.gpu.attention:paged_decode"),
    Part("fused", 35, "intarsia_bench.gpu.fused:fused"),
    Part("llama", 110, "intarsia_bench.gpu.llama:llama"),
    Part("transformers", 85, "intarsia_bench.gpu.transformers_decode:transformers_decode"),
)


def run_here(name: str, out: Path, **changes: Any) -> None:
    """Run one part of the benchmark in this process; its figures go to a file as they come, a line each."""
    from intarsia_bench.gpu.setting import Setting

    (part,) = [part for part in PARTS if part.name == name and part.where]
    with out.open("a") as file:

        def emit(figure: Mapping[str, Any]) -> None:
            file.write(json.dumps(dict(figure)) + "\n")
            file.flush()

        function: Any = _loaded(part.where)
        function(Setting(**changes), emit)


def _loaded(where: str) -> Any:
    """Return a part's function; the import is the part's own work."""
    import importlib

    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


def command_of(part: Part, tests: Path, out: Path) -> list[str]:
    """Return the command that runs a part."""
    if part.where:
        return [sys.executable, "-m", "intarsia_bench.gpu", "part", part.name, "--out", str(out)]
    options = ["-m", "gpu", "-v", "--tb=short", "-p", "no:cacheprovider", "--color=no"]
    return [sys.executable, "-m", "pytest", str(tests), *options]


def run_apart(
    part: Part, command: Sequence[str], out: Path, *, seconds: float, cwd: Path
) -> tuple[PartRun, list[Figure]]:
    """Run a part's command in a process of its own, for so many seconds at most; return how it went and its figures."""
    start = time.perf_counter()
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(  # noqa: S603  our own modules
            list(command), stdout=log, stderr=subprocess.STDOUT, cwd=cwd, env=environment, start_new_session=True
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        log.seek(0)
        output = log.read()
    spent = time.perf_counter() - start
    status = "ok" if code == 0 else "out of time" if code is None else "failed"
    message = _tests_message(output) if not part.where else "" if code == 0 else _last(output)
    return PartRun(part.name, status, round(spent, 1), message), figures_in(out)


def _end(process: subprocess.Popen[Any]) -> None:
    """End a process and all that it started: it leads a group of its own."""
    for kind, patience in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, None)):
        if process.poll() is not None:
            return
        os.killpg(process.pid, kind)
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue


def figures_in(out: Path) -> list[Figure]:
    """Return the figures of a file; a last line that was cut off is left out."""
    if not out.exists():
        return []
    found: list[Figure] = []
    for line in out.read_text().splitlines():
        try:
            figure = json.loads(line)
        except ValueError:
            continue
        if isinstance(figure, dict) and isinstance(figure.get("key"), str):
            found.append(figure)
    return found


_RESULT = re.compile(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", flags=re.MULTILINE)


def _tests_message(output: str) -> str:
    """Return how many tests passed, failed and were skipped, and which failed; pytest's end where none ran."""
    results = _RESULT.findall(output)
    if not results:
        return _last(output)
    counts = {word: sum(1 for _, result in results if result == word) for _, word in results}
    failed = [name for name, result in results if result in ("FAILED", "ERROR")]
    text = ", ".join(f"{count} {word.lower()}" for word, count in counts.items())
    return text + (f": {', '.join(failed)}" if failed else "")


def _last(output: str) -> str:
    return "\n".join(output.strip().splitlines()[-_KEPT_LINES:])
